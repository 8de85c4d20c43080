"""A process that owns a sandbox, for tests that need another user's sandbox: `Host` drives it over pipes.

The process may run as an unprivileged user who cannot read this interpreter, so it starts a Python that is readable.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from agentrl.sandbox import RunResult, Sandbox, SandboxFailure, SandboxLimits, SandboxSession, SandboxUnavailable
from agentrl.sandbox.interpreter import find_interpreter

ROOT = Path(__file__).parents[2]
OTHER_USER = 65534
SECRET = "canary-7f3a9c"
"""A secret in the host process's environment, and nowhere that a program may read."""


class Host:
    """The other process. `pid` is its process id; `user` its user id."""

    def __init__(self, process: "subprocess.Popen[str]", backend: str, user: int) -> None:
        self._process, self.backend, self.user = process, backend, user
        self.pid = process.pid

    def run(self, code: str, *, stdin: str = "", timeout: float | None = None) -> RunResult:
        """Run a program."""
        return self._ask(op="run", code=code, stdin=stdin, timeout=timeout)

    def cell(self, session: str, code: str, *, timeout: float | None = None) -> RunResult:
        """Run a cell in the session of that name, which its first use opens."""
        return self._ask(op="cell", session=session, code=code, timeout=timeout)

    def _ask(self, **message: Any) -> RunResult:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise AssertionError(answer["error"])
        return RunResult(**answer)


class HostUnavailable(Exception):
    """The backend does not work here; the message gives the reason."""


@contextmanager
def open_host(backend: str, user: int, limits: SandboxLimits) -> Iterator[Host]:
    """Start a host process as `user` (its own id, or any other if this process is root)."""
    other = user != os.geteuid()
    interpreter = find_interpreter(by_others=other)
    executable = interpreter.executable if other else sys.executable
    path = os.pathsep.join([str(ROOT), *interpreter.site]) if other else str(ROOT)
    process = subprocess.Popen(
        [executable, "-m", "tests.sandbox.host", backend, json.dumps(asdict(limits))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "AGENTRL_CANARY": SECRET, "PYTHONDONTWRITEBYTECODE": "1"},
        user=user if other else None,
        group=user if other else None,
        extra_groups=[] if other else None,
    )
    assert process.stdout is not None
    try:
        first = json.loads(process.stdout.readline() or '{"unavailable": "the host process did not start"}')
        if "unavailable" in first:
            raise HostUnavailable(first["unavailable"])
        yield Host(process, backend, user)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(120)
        process.stdout.close()


async def _serve(backend: Any, limits: SandboxLimits) -> None:
    sessions: dict[str, SandboxSession] = {}
    try:
        async with Sandbox(backend, limits=limits, preload=(), warm=1) as box:
            _say({"ready": box.python})
            while line := await anyio.to_thread.run_sync(sys.stdin.readline):
                message = json.loads(line)
                try:
                    if message["op"] == "run":
                        result = await box.run(message["code"], stdin=message["stdin"], timeout=message["timeout"])
                    else:
                        name = message["session"]
                        if name not in sessions:
                            sessions[name] = await box.session().__aenter__()
                        result = await sessions[name].run(message["code"], timeout=message["timeout"])
                    _say(asdict(result))
                except SandboxFailure as error:
                    _say({"error": str(error)})
            for session in sessions.values():
                await session.__aexit__(None, None, None)
    except SandboxUnavailable as error:
        _say({"unavailable": str(error)})


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(_serve, sys.argv[1], SandboxLimits(**json.loads(sys.argv[2])))
