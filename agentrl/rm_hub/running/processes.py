"""The pool's end of its worker processes (see `worker.py` for theirs).

1. `NurseryProcess` starts the one process that the workers are forked from; `fork()` gives a `WorkerProcess`, ready to
   grade.
2. Nothing here blocks the event loop: sockets are non-blocking and waited for, and long answers are sent in pieces.
3. `kill` and `close` are plain functions, so that they can run on any way out, a cancellation included.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from agentrl.errors import GraderFailure
from agentrl.rm_hub.running.worker import PACKET

_WORKER = Path(__file__).parent / "worker.py"
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}

Lost = (OSError, EOFError, anyio.ClosedResourceError)
"""What reading from or writing to a process raises when it has gone."""


class WorkerProcess:
    """One worker process: send it a request, read its reply, kill it."""

    def __init__(self, connection: socket.socket, pid: int, pidfd: int, loaded: frozenset[str]) -> None:
        self.connection, self.pid, self.pidfd, self.loaded = connection, pid, pidfd, loaded
        self.done = 0
        self._received = bytearray()

    @property
    def alive(self) -> bool:
        """Whether the process is still there."""
        return self.pidfd >= 0 and not _readable(self.pidfd)

    def cpu_seconds(self) -> float:
        """Processor time that the process has used so far (its clock's number is that of clock_getcpuclockid(3)).

        Raises:
            OSError: it has gone.
        """
        return time.clock_gettime((~self.pid << 3) | 2)

    async def ask(self, lines: Iterable[bytes]) -> bytes:
        """Send a request and return the reply's line.

        Raises:
            OSError, EOFError: the process ended.
        """
        for line in lines:
            await _send(self.connection, line)
            await anyio.lowlevel.checkpoint()  # the next piece of a long answer is encoded at the next turn of the loop
        reply = await self._reply()
        self.done += 1
        return reply

    async def _reply(self) -> bytes:
        while not self._received.endswith(b"\n"):  # one request, one line
            try:
                data = self.connection.recv(PACKET)
            except BlockingIOError:
                await anyio.wait_readable(self.connection)
                continue
            if not data:
                raise EOFError("the worker hung up")
            self._received += data
        reply, self._received = bytes(self._received), bytearray()
        return reply

    async def late_reply(self) -> bytes | None:
        """The reply if it lies here already: a busy event loop may see its timer before the answer."""
        if not _readable(self.connection.fileno()):
            return None
        with anyio.CancelScope(shield=True), anyio.move_on_after(1.0):
            return await self._reply()
        return None

    def kill(self) -> None:
        """SIGKILL; the nursery kills what the process had started, too."""
        if self.pidfd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.close(self.pidfd)
        self.pidfd = -1
        _close(self.connection)


class NurseryProcess:
    """The process that loads graders and forks workers; started when it is first needed, and again if it was killed."""

    def __init__(self, memory_mb: int) -> None:
        self.memory_mb = memory_mb
        self.loaded: frozenset[str] = frozenset()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._turn = anyio.Lock()

    @property
    def alive(self) -> bool:
        """Whether the process runs; where it was killed, `loaded` is forgotten."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        return self._process is not None

    async def load(self, names: Sequence[str]) -> None:
        """Import graders; workers forked from now on have them.

        Raises:
            GraderFailure: one cannot be imported (`grader_unavailable`), or the process does not start.
        """
        if self.loaded.issuperset(names):
            return
        async with self._turn:
            new = [name for name in names if name not in self.loaded]
            if not new:
                return
            answer, _ = await self._order({"do": "load", "names": new})
            self.loaded |= frozenset(new) - answer["failed"].keys()
            for name, reason in answer["failed"].items():
                raise GraderFailure(f"--rm-type {name} cannot be loaded: {reason}", kind="grader_unavailable")

    async def fork(self) -> WorkerProcess:
        """A fresh worker with all graders that are loaded."""
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            async with self._turn:
                answer, fds = await self._order({"do": "fork"}, theirs)
                return WorkerProcess(ours, answer["pid"], fds[0], self.loaded)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    async def ended(self, worker: WorkerProcess) -> tuple[str, bool]:
        """In words, how a worker ended, and whether it was ended from outside."""
        async with self._turn:
            answer, _ = await self._order({"do": "ended", "pid": worker.pid})
        status: int = answer["status"]
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        return how, -status in _FROM_OUTSIDE

    def close(self) -> None:
        """End the process and with it every worker."""
        if self._control is not None:
            _close(self._control)
            self._control = None
        if self._process is not None:
            # The workers die with it (parent-death signal); what they had started is in their groups, which
            # the nursery ends on hang-up, so it gets the time for that.
            try:
                self._process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self.loaded = frozenset()

    async def _order(self, message: dict[str, Any], *passed: socket.socket) -> tuple[Any, list[int]]:
        """One order and its answer; not to be cut in half, so a cancellation waits for it (milliseconds)."""
        with anyio.CancelScope(shield=True):
            try:
                with anyio.fail_after(_START_SECONDS):
                    control = self._start()
                    socket.send_fds(control, [json.dumps(message).encode()], [s.fileno() for s in passed])
                    await anyio.wait_readable(control)
                    data, fds, _, _ = socket.recv_fds(control, PACKET, 1)
                if not data:
                    raise EOFError
            except (*Lost, TimeoutError) as error:
                self.close()
                raise GraderFailure(
                    f"the graders' process did not start or ended ({type(error).__name__}: {error})",
                    kind="grader_crashed",
                ) from error
        return json.loads(data), fds

    def _start(self) -> socket.socket:
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [folder or os.getcwd() for folder in sys.path]
        with theirs:
            fd = theirs.fileno()
            # Forked by this thread on purpose: the parent-death signal is tied to the thread that runs the loop.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER), *map(str, (fd, os.getpid(), self.memory_mb)), *path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD},
                pass_fds=(fd,),
                start_new_session=True,
            )
        ours.setblocking(False)
        self._control = ours
        return ours


_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What a process is ended with by others, the kernel's search for memory among them."""
_START_SECONDS = 60.0
"""Seconds that an order may take; the longest ones load libraries."""
_GRACE = 0.5
"""Seconds that the nursery may take to end its workers once the pool has hung up."""


async def _send(connection: socket.socket, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[connection.send(left) :]
        except BlockingIOError:
            await anyio.wait_writable(connection)


def _close(connection: socket.socket) -> None:
    """Close, and wake the task that waits for the socket."""
    with contextlib.suppress(anyio.NoEventLoopError):
        anyio.notify_closing(connection)
    connection.close()


def _readable(descriptor: int) -> bool:
    """Whether there is something to read; `select` would refuse the high numbers that descriptors of a big rollout have."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
