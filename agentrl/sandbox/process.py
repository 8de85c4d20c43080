"""A confined process as the parent sees it: our end of a socket to its jailer. Nothing here blocks the event loop."""

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import anyio

from agentrl.errors import SandboxFailure, SandboxInput, SandboxUnavailable, raised_as
from agentrl.sandbox.inside import frames
from agentrl.sandbox.limits import RunResult

_START_SECONDS = 20.0
_GRACE_SECONDS = 10.0


class NeverBegun(Exception):
    """A request was not begun, because its process had just ended."""


_Closed = anyio.ClosedResourceError  # the jailer closed the connection, or we did


class Process:
    """A process for one program, or for the cells of a session. `ended` is true after the process is closed."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._decoder = frames.FrameDecoder()
        self.ended = False

    async def ready(self) -> Self:
        """Wait until the process is confined. Raises SandboxFailure: confinement failed, and the process is closed."""
        answer: dict[str, Any] = {}
        try:
            with anyio.move_on_after(_START_SECONDS), contextlib.suppress(_Closed):
                answer = await self._receive()
        finally:
            if "ready" not in answer:
                self.close()
        if "ready" not in answer:
            why = answer.get("failed", f"it ended, or was not ready within {_START_SECONDS:g} s")
            raise SandboxFailure(f"a process could not be confined: {why}")
        return self

    async def ask(self, request: bytes, wall: float) -> RunResult:
        """Run a request within `wall` seconds. If the call is cancelled, the caller must call `end`. Raises NeverBegun: the process had ended."""
        start = time.perf_counter()
        answer: dict[str, Any] = {"stdout": "", "stderr": "", "outcome": "timeout", "returncode": None}
        try:
            # The jailer keeps the deadline. This later deadline is for a jailer that has ended or is starved.
            with anyio.move_on_after(wall + _GRACE_SECONDS):
                with contextlib.suppress(_Closed):  # an answer may still wait in the socket
                    await self._send(request)
                answer = await self._receive()
        except _Closed:
            answer["outcome"] = "killed"  # the process ended with its jailer, most likely out of memory
        seconds = time.perf_counter() - start
        if "gone" in answer:
            self.close()
            raise NeverBegun
        if (ended := answer.pop("ended", None)) is None:
            await self.end()
        elif ended:
            self.close()
        return RunResult(**answer, seconds=seconds)

    async def end(self) -> None:
        """Close the connection. If the process may still run, wait until it and its descendants have ended."""
        if not self.ended:
            with anyio.move_on_after(_GRACE_SECONDS, shield=True), contextlib.suppress(_Closed, OSError):
                self._socket.shutdown(socket.SHUT_WR)
                while True:
                    await self._receive()
        self.close()

    def close(self) -> None:
        """Close our end; the jailer ends the process by itself."""
        self.ended = True
        if self._socket.fileno() >= 0:
            anyio.notify_closing(self._socket)  # a run may wait for its answer
        self._socket.close()

    async def _send(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                await anyio.wait_writable(self._socket)
            except OSError as error:
                raise _Closed(str(error)) from error

    async def _receive(self) -> dict[str, Any]:
        while True:
            try:
                if (message := self._decoder.next()) is not None:
                    return message
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                await anyio.wait_readable(self._socket)
                continue
            except OSError as error:
                raise _Closed(str(error)) from error
            if not data:
                raise _Closed("the sandbox's process ended")
            self._decoder.feed(data)


def encode_request(code: str, stdin: str, wall: float) -> bytes:
    """Return the bytes of a request. They exceed `frames.LARGEST` only if the code is too long. Raises SandboxInput:
    `stdin` is too long, or cannot be encoded."""
    try:
        stdin.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        said = f"stdin: character {error.start} is {stdin[error.start]!a}, a lone surrogate, which UTF-8 cannot encode"
        remedy = 'make the text with bytes.decode("utf-8", "replace"), or leave it out'
        raise SandboxInput(f"{said}; {remedy}") from error
    request = frames.encode({"code": code, "stdin": stdin, "wall_seconds": wall})
    if len(request) > frames.LARGEST and len(stdin) >= len(code):
        said = f"stdin: {len(stdin)} characters are too long for a message of at most {frames.LARGEST} bytes"
        raise SandboxInput(f"{said}; give less, or let the program make its data")
    return request


@contextmanager
def _bait() -> Iterator[tuple[str, str]]:
    """Yield a program that tries to reach things on the host, and the folder on the host where it tries to write."""
    folder = tempfile.TemporaryDirectory(prefix="agentrl-trial-")
    with folder as name, socket.create_server(("127.0.0.1", 0)) as listener:
        os.chmod(name, 0o777)
        secret, written = os.path.join(name, "secret"), os.path.join(name, "written")
        with open(secret, "w", encoding="ascii") as file:
            file.write("secret")
        trial = Path(__file__).with_name("trial.py.txt").read_text(encoding="utf-8")
        yield trial.format(secret=secret, written=written, port=listener.getsockname()[1], pid=os.getpid()), name


async def check_confined(run: Callable[[str], Awaitable[RunResult]]) -> None:
    """Run a program that tries to escape. Raises SandboxUnavailable: the program failed, or reached the host."""
    with _bait() as (program, folder):
        result = await run(program)
        taken = "written" in os.listdir(folder)
    if not result.ok:
        said = result.last_line or "nothing on its standard error"
        raise SandboxUnavailable(f"a trial program ended with {result.outcome}: {said}")
    with raised_as(SandboxUnavailable, f"a trial program printed {result.stdout[:200]!r}", ValueError, shown=""):
        reached = json.loads(result.stdout)
    if reached or taken:
        raise SandboxUnavailable(f"a trial program could reach {', '.join(reached) or 'a file of the host'}")
