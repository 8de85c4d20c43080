"""Graders in worker processes, with a hard deadline for every answer.

1. A worker that overruns its deadline is killed with all processes that it started. Other answers are not affected.
2. An overrun, a crash or exhausted memory counts against the answer (`registry.exhausted`). Exceptions: a grader of the
   user, a worker killed from outside, and an overrun with a CPU time of less than half the deadline.
3. Answers start in order. The deadline starts when a worker has the grader; `grader_total_timeout` limits the wait.
4. The pool never blocks its event loop, and runs in its callers' tasks. `close` or this process's end ends workers.
5. The pools of Python and Pebble are not used: they pickle results, and import the user's main module."""

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
from typing import Any

import anyio

from agentrl.errors import GraderFailure
from agentrl.rm_hub.grade import Grade, Metadata
from agentrl.rm_hub.registry import GraderSpec, exhausted
from agentrl.rm_hub.running import worker as protocol
from agentrl.rm_hub.settings import RmHubSettings

STARVED = 0.5  # minimum CPU time, as a share of the deadline, for an overrun to count against the answer
_START_SECONDS = 60.0  # seconds that a worker may take to start and load its graders
_GRACE = 1.0  # seconds to wait for a closed or killed process to end, and for a reply that is being sent
_PIECE = 1 << 16
_MAIN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import agentrl.rm_hub.running.worker as worker; "
_MAIN += "worker.main(*json.loads(sys.argv[2]))"
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals with which other processes end a worker; the kernel's OOM killer sends SIGKILL too."""
_LOST = (OSError, EOFError, anyio.ClosedResourceError)  # errors of reading from and writing to a process that has ended


class WorkerPool:
    """The worker processes of a `GraderRunner`, started on first use. Reads the settings `grader_*`."""

    def __init__(self, settings: RmHubSettings) -> None:
        self.processes = settings.grader_processes or min(8, os.cpu_count() or 1)
        self.started = 0  # number of workers started so far
        self._settings = settings
        self._names: dict[str, None] = {}  # graders that new workers load
        self._free = anyio.Semaphore(self.processes)
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._ended: list[WorkerProcess] = []  # killed, not reaped yet
        self._closed = False

    async def load(self, names: Sequence[str]) -> None:
        """Load graders early. Raises GraderFailure: no worker starts, or an import fails (`grader_unavailable`)."""
        if not self._names.keys() >= set(names):
            self._idle.append(await self._start(names))

    async def grade(self, rm_type: str, spec: GraderSpec, response: str, label: Any, metadata: Metadata) -> Grade:
        """Grade one answer that `registry.check_inputs` has passed. Raises as `GraderRunner.grade` does."""
        self._check_open()
        longest = self._settings.grader_total_timeout
        with anyio.move_on_after(longest) as queue:
            await self._free.acquire()
        if queue.cancelled_caught:
            said = f"--rm-type {rm_type}: no worker was free for {longest:g} s; more of them: --grader-processes"
            raise GraderFailure(said, kind="grader_timeout")
        try:
            self._check_open()
            # Encode at the answer's turn: encoding a thousand answers at once would block the event loop.
            pieces = protocol.request(rm_type, response, label, metadata, conversation=spec.conversation)
            outcome = protocol.read_reply(await self._run(rm_type, pieces))
        except _Exhausted as failure:
            return exhausted(spec, failure)
        finally:
            self._free.release()
        if isinstance(outcome, Grade):
            return outcome
        if outcome.kind == "grader_out_of_memory":
            return exhausted(spec, outcome)
        raise outcome

    def close(self) -> None:
        """End all processes; answers in flight get `grader_closed`."""
        self._closed = True
        for worker in (*self._idle, *self._busy):
            self._kill(worker)
        self._idle.clear()
        for worker in self._ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(_GRACE)

    def __del__(self) -> None:
        # During interpreter shutdown no call is safe; the kernel ends the workers with this process.
        if not self._closed and not sys.is_finalizing():
            self.close()

    async def _run(self, rm_type: str, pieces: Iterable[bytes]) -> bytes:
        worker = await self._worker(rm_type)
        self._busy.add(worker)
        try:
            reply = await self._ask(worker, rm_type, pieces)
        except BaseException:
            self._kill(worker)
            raise
        finally:
            self._busy.discard(worker)
        if self._closed or worker.done >= self._settings.grader_recycle:
            self._kill(worker)
        else:
            self._idle.append(worker)
        return reply

    async def _ask(self, worker: "WorkerProcess", rm_type: str, pieces: Iterable[bytes]) -> bytes:
        """Return the worker's reply. Raises GraderFailure: the worker ended, or overran the deadline."""
        timeout = self._settings.grader_timeout
        try:
            before = worker.cpu_seconds()
            with anyio.move_on_after(timeout):
                return await worker.ask(pieces)
            if worker.readable:  # a busy event loop may see its timer before the reply
                with anyio.CancelScope(shield=True), anyio.move_on_after(_GRACE):
                    return await worker.receive()
            had = worker.cpu_seconds() - before
        except _LOST as error:
            self._check_open(error)
            how, killed = await worker.end()
            failure = GraderFailure if killed else _Exhausted
            raise failure(f"--rm-type {rm_type}: the grader's process {how}", kind="grader_crashed") from error
        overran = f"--rm-type {rm_type}: grading took longer than {timeout:g} s (--grader-timeout)"
        if had < STARVED * timeout:
            raise GraderFailure(f"{overran}, with {had:.1f} s of processor time", kind="grader_timeout")
        raise _Exhausted(overran, kind="grader_timeout")

    async def _worker(self, rm_type: str) -> "WorkerProcess":
        """Return an idle worker that has the grader, or a new one."""
        while self._idle:
            worker = self._idle.pop()
            if rm_type in worker.loaded and not worker.readable:  # readable: the worker closed its socket
                return worker
            self._kill(worker)
        return await self._start((rm_type,))

    async def _start(self, names: Sequence[str]) -> "WorkerProcess":
        """Start a worker that loads these graders and the graders of earlier workers."""
        self._ended = [worker for worker in self._ended if worker.process.poll() is None]
        self.started += 1
        worker = WorkerProcess(list({**self._names, **dict.fromkeys(names)}), self._settings.grader_memory_mb)
        self._busy.add(worker)
        try:
            with anyio.fail_after(_START_SECONDS):
                failed: dict[str, str] = protocol.value(await worker.receive())
            for name in failed.keys() & set(names):
                raise GraderFailure(f"--rm-type {name} cannot be loaded: {failed[name]}", kind="grader_unavailable")
        except BaseException as error:
            self._kill(worker)
            if not isinstance(error, (*_LOST, TimeoutError)):
                raise
            self._check_open(error)
            said = f"the graders' process did not start or ended ({type(error).__name__}: {error})"
            raise GraderFailure(said, kind="grader_crashed") from error
        finally:
            self._busy.discard(worker)
        worker.loaded -= failed.keys()
        self._names |= dict.fromkeys(names)
        return worker

    def _kill(self, worker: "WorkerProcess") -> None:
        worker.kill()
        self._ended.append(worker)

    def _check_open(self, cause: BaseException | None = None) -> None:
        if self._closed:
            raise GraderFailure("the grader pool is closed", kind="grader_closed") from cause


class WorkerProcess:
    """A worker process that takes requests and sends replies. Its first reply says why graders cannot be loaded. The
    worker has its own session. It is reaped after the session is killed; before that, its pid is not reused."""

    def __init__(self, names: Sequence[str], memory_mb: int) -> None:
        self.loaded = frozenset(names)
        self.done = 0
        self._received = bytearray()
        self.connection, theirs = socket.socketpair()
        with theirs:
            path = [folder or os.getcwd() for folder in sys.path]
            arguments = (theirs.fileno(), os.getpid(), memory_mb, names)
            # Fork in this thread on purpose: the parent-death signal is sent when the forking thread ends.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, json.dumps(path), json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.connection.setblocking(False)

    @property
    def readable(self) -> bool:
        """True if the socket has bytes or is closed. `poll` also accepts high descriptor numbers, unlike `select`."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(0))

    def cpu_seconds(self) -> float:
        """Return the worker's CPU time (clock id: see clock_getcpuclockid(3)). Raises OSError: the worker has ended."""
        return time.clock_gettime((~self.process.pid << 3) | 2)

    async def ask(self, pieces: Iterable[bytes]) -> bytes:
        """Send a request and return the reply's line. Raises OSError, EOFError: the process ended."""
        for piece in pieces:
            left = memoryview(piece)
            while left:
                try:
                    left = left[self.connection.send(left[:_PIECE]) :]
                except BlockingIOError:
                    await anyio.wait_writable(self.connection)
        self.done += 1
        return await self.receive()

    async def receive(self) -> bytes:
        """Return the next reply's line. Raises OSError, EOFError: the process ended."""
        while not self._received.endswith(b"\n"):  # one request, one line
            try:
                data = self.connection.recv(_PIECE)
            except BlockingIOError:
                await anyio.wait_readable(self.connection)
                continue
            if not data:
                raise EOFError("the worker hung up")
            self._received += data
        reply, self._received = bytes(self._received), bytearray()
        return reply

    async def end(self) -> tuple[str, bool]:
        """Wait for a process that closed its socket. Return how it ended, and true if it was killed from outside."""
        pidfd = os.pidfd_open(self.process.pid)
        try:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_GRACE):
                await anyio.wait_readable(pidfd)
        finally:
            os.close(pidfd)
        self.kill()
        status = self.process.wait()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        return how, -status in _FROM_OUTSIDE

    def kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        if self.connection.fileno() >= 0:
            with contextlib.suppress(anyio.NoEventLoopError):
                anyio.notify_closing(self.connection)
            self.connection.close()


class _Exhausted(GraderFailure):
    """Grading the answer exhausted time, memory or stack."""
