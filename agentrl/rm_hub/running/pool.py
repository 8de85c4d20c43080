"""`GraderPool`: graders in worker processes, with a hard deadline for every item.

1. A worker that overruns its item's deadline is killed; neither that nor one that dies or runs out of memory is noticed
   by other items. Each of the three is the answer's doing where the grader is a built-in one (`registry.exhausted`), and
   a `GraderFailure` where the grader is the user's own, where the worker was killed from outside, and where it had the
   processor for less than half of its deadline.
2. Items start in the order in which they came. The deadline runs from an item's start; `queue_timeout` bounds the wait
   before it. Loading a grader's libraries is no part of either.
3. The pool has no tasks of its own: it works in its callers' tasks, may be opened and closed in different ones, and a
   cancelled caller leaves a killed worker behind and nothing else. It belongs to one event loop. Leaving the context ends
   all processes; so does the end of the process that opened it, however it ends.
"""

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import anyio

from agentrl.errors import GraderFailure, SettingsError
from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.registry import GraderSpec, check_inputs, exhausted, find
from agentrl.rm_hub.running import frames
from agentrl.rm_hub.running.processes import Lost, NurseryProcess, WorkerProcess

STARVED = 0.5
"""Share of its deadline for which a worker must have had the processor if the answer is to be blamed."""


class GraderPool:
    """An async context manager that grades in worker processes.

        async with GraderPool(timeout=5.0) as pool:
            grade = await pool.grade("math", r"So it is \\boxed{\\frac12}.", "0.5")

    Args:
        processes: worker processes; default one a core, at most 8.
        timeout: seconds an item may run.
        memory_mb: memory that a worker may take besides what the graders' libraries take.
        recycle: items after which a worker is replaced.
        queue_timeout: seconds an item may wait for a worker.
        start_timeout: seconds that loading a grader may take.
        preload: graders to load at the start; others are loaded when they are first asked for.
    """

    def __init__(
        self,
        *,
        processes: int | None = None,
        timeout: float = 10.0,
        memory_mb: int = 1024,
        recycle: int = 1000,
        queue_timeout: float = 600.0,
        start_timeout: float = 60.0,
        preload: Sequence[str] = (),
    ) -> None:
        self.processes = processes or min(8, os.cpu_count() or 1)
        self.timeout, self.recycle, self.queue_timeout = timeout, recycle, queue_timeout
        self.preload = tuple(preload)
        self.counts: Counter[str] = Counter()
        """How often what happened: `graded`, kinds of failures and of answers that were not judged, `forked`."""
        self._nursery = NurseryProcess(memory_mb, start_timeout)
        self._free = anyio.Semaphore(self.processes)
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        for name in self.preload:
            _runnable(name)
        try:
            await self._nursery.load(self.preload)
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    async def grade(
        self,
        rm_type: str,
        response: str,
        label: Any = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> Grade:
        """Grade one answer; arguments as of `agentrl.rm_hub.grade`.

        Raises:
            SettingsError: no such grader, or one that does not run in a process.
            GraderFailure: kinds `grader_raised`, `grader_too_large`, `grader_unavailable`, `grader_closed`, those of
                the grader itself, and `grader_timeout`, `grader_crashed` and `grader_out_of_memory` as said above.
        """
        spec, metadata = _runnable(rm_type), metadata or {}
        try:
            if (too_long := check_inputs(rm_type, spec, response, label, metadata)) is not None:
                self.counts[too_long.unjudged] += 1
                return too_long
            async with self._place(rm_type):
                # At the item's turn: a thousand items that come at once must not all be encoded in one go.
                lines = frames.request(rm_type, response, label, metadata, conversation=spec.conversation)
                outcome = frames.read_reply(await self._run(rm_type, lines, timeout or self.timeout))
            if isinstance(outcome, GraderFailure):
                raise _Exhausted(str(outcome), kind=outcome.kind) if outcome.kind == "grader_out_of_memory" else outcome
        except _Exhausted as failure:
            self.counts[failure.kind] += 1
            return exhausted(spec, failure)
        except GraderFailure as failure:
            self.counts[failure.kind] += 1
            raise
        self.counts[outcome.unjudged or "graded"] += 1
        return outcome

    def close(self) -> None:
        """End all processes; items in flight get `grader_closed`. For a pool that was not opened by `async with`."""
        self._closed = True
        for worker in (*self._idle, *self._busy):
            worker.kill()
        self._idle.clear()
        self._nursery.close()

    def __del__(self) -> None:
        # While the interpreter shuts down nothing can be called safely; the kernel ends the workers with it.
        if not self._closed and not sys.is_finalizing():
            self.close()

    async def _run(self, rm_type: str, lines: Iterator[bytes], timeout: float) -> bytes:
        worker = await self._worker(rm_type)
        self._busy.add(worker)
        try:
            reply = await self._ask(worker, rm_type, lines, timeout)
        except BaseException:
            worker.kill()
            raise
        finally:
            self._busy.discard(worker)
        if self._closed or worker.done >= self.recycle:
            worker.kill()
        else:
            self._idle.append(worker)
        return reply

    async def _ask(self, worker: WorkerProcess, rm_type: str, lines: Iterator[bytes], timeout: float) -> bytes:
        """The worker's reply, or the failure that there is none."""
        try:
            before = worker.cpu_seconds()
            with anyio.move_on_after(timeout):
                return await worker.ask(lines)
            if (late := await worker.late_reply()) is not None:
                return late
            had = worker.cpu_seconds() - before
        except Lost as error:
            worker.kill()
            self._check_open(error)
            how, killed = await self._nursery.ended(worker)
            failure = GraderFailure if killed else _Exhausted
            raise failure(f"--rm-type {rm_type}: the grader's process {how}", kind="grader_crashed") from error
        overran = f"--rm-type {rm_type}: grading took longer than {timeout:g} s (--grader-timeout)"
        if had < STARVED * timeout:
            raise GraderFailure(f"{overran}, with {had:.1f} s of processor time", kind="grader_timeout")
        raise _Exhausted(overran, kind="grader_timeout")

    @asynccontextmanager
    async def _place(self, rm_type: str) -> AsyncIterator[None]:
        """Wait in the queue."""
        self._check_open(None)
        await self._nursery.load((rm_type,))
        try:
            with anyio.fail_after(self.queue_timeout):
                await self._free.acquire()
        except TimeoutError as error:
            raise GraderFailure(
                f"--rm-type {rm_type}: no worker was free for {self.queue_timeout:g} s; "
                "more of them: --grader-processes",
                kind="grader_timeout",
            ) from error
        try:
            self._check_open(None)
            yield
        finally:
            self._free.release()

    async def _worker(self, rm_type: str) -> WorkerProcess:
        """An idle worker that has the grader, or a new one."""
        while self._idle:
            worker = self._idle.pop()
            if self._nursery.alive and rm_type in worker.loaded and worker.alive:
                return worker
            worker.kill()
        if not self._nursery.alive:
            await self._nursery.load((rm_type,))
        worker = await self._nursery.fork()
        self.counts["forked"] += 1
        return worker

    def _check_open(self, cause: BaseException | None) -> None:
        if self._closed:
            raise GraderFailure("the grader pool is closed", kind="grader_closed") from cause


class _Exhausted(GraderFailure):
    """Grading the answer took more time, memory or stack than there is."""


def _runnable(rm_type: str) -> GraderSpec:
    spec = find(rm_type)
    if spec.runs != "process":
        raise SettingsError(
            f"--rm-type {rm_type} waits for something else and runs in no worker process; use async_rm or grade_many"
        )
    return spec
