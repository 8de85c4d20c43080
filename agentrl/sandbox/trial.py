"""A backend's trial: does it run code, and does it keep the code in?"""

import json
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable

from agentrl.sandbox.errors import SandboxUnavailable
from agentrl.sandbox.limits import RunResult

_PROBE = """
import json, os, socket
reached = []
def attempt(name, function):
    try:
        function()
    except OSError:
        return
    reached.append(name)
def write():
    with open({written!r}, "w") as file:
        file.write("x")
def connect():
    socket.create_connection(("127.0.0.1", {port}), timeout=1).close()
attempt("a file of the host", lambda: open({secret!r}).close())
attempt("/etc/passwd", lambda: open("/etc/passwd").close())
attempt("writing a file on the host", write)
attempt("the network", connect)
attempt("another process", lambda: os.kill({pid}, 0) if os.getpid() != {pid} and {pid} != 1 else os.stat("/nowhere"))
print(json.dumps(reached))
"""


class Bait:
    """Things on the host that a program must not reach, while it is open."""

    def __enter__(self) -> "Bait":
        self._folder = tempfile.TemporaryDirectory(prefix="agentrl-trial-")
        os.chmod(self._folder.name, 0o777)
        secret = os.path.join(self._folder.name, "secret")
        with open(secret, "w", encoding="ascii") as file:
            file.write("secret")
        self._written = os.path.join(self._folder.name, "written")
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.program = _PROBE.format(secret=secret, written=self._written, port=port, pid=os.getpid())
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._folder.cleanup()

    @property
    def taken(self) -> bool:
        """Whether a program wrote where it must not."""
        return os.path.exists(self._written)


async def check_confined(run: Callable[[str], Awaitable[RunResult]]) -> None:
    """Run a program that tries to get out.

    Raises:
        SandboxUnavailable: it did not run, or something was not kept from it.
    """
    with Bait() as bait:
        result = await run(bait.program)
        taken = bait.taken
    if not result.ok:
        last = (result.stderr.strip().splitlines() or ["nothing on its standard error"])[-1]
        raise SandboxUnavailable(f"a trial program ended with {result.outcome}: {last}")
    try:
        reached = json.loads(result.stdout)
    except ValueError as error:
        raise SandboxUnavailable(f"a trial program printed {result.stdout[:200]!r}") from error
    if reached or taken:
        raise SandboxUnavailable(f"a trial program could reach {', '.join(reached)}")
