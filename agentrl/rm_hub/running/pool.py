"""Graders in worker processes, with a hard deadline for every answer.

1. A worker that overruns its answer's deadline is killed; neither that nor one that dies or runs out of memory is noticed
   by other answers. Each of the three is the answer's doing where the grader is a built-in one (`registry.exhausted`), and
   a `GraderFailure` where the grader is the user's own, where the worker was killed from outside, and where it had the
   processor for less than half of its deadline.
2. Answers start in the order in which they came. The deadline runs from an answer's start; `grader_total_timeout` bounds
   the wait before it. Loading a grader's libraries is no part of either.
3. The pool has no tasks of its own: it works in its callers' tasks, may be used and closed in different ones, and a
   cancelled caller leaves a killed worker behind and nothing else. It belongs to one event loop. `close` ends all
   processes; so does the end of the process that uses it, however it ends.
"""

import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from agentrl.errors import GraderFailure
from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.registry import GraderSpec, exhausted
from agentrl.rm_hub.running import frames
from agentrl.rm_hub.running.processes import Lost, NurseryProcess, WorkerProcess
from agentrl.rm_hub.settings import RmHubSettings

STARVED = 0.5
"""Share of its deadline for which a worker must have had the processor if the answer is to be blamed."""


class WorkerPool:
    """The worker processes of a `GraderRunner`, made when they are first needed.

    Args:
        settings: the `grader_*` fields are read.
    """

    def __init__(self, settings: RmHubSettings) -> None:
        self.processes = settings.grader_processes or min(8, os.cpu_count() or 1)
        self.forked = 0  # workers so far
        self._settings = settings
        self._nursery = NurseryProcess(settings.grader_memory_mb)
        self._free = anyio.Semaphore(self.processes)
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._closed = False

    async def load(self, names: Sequence[str]) -> None:
        """Load graders ahead of the first answer."""
        await self._nursery.load(names)

    async def grade(
        self, rm_type: str, spec: GraderSpec, response: str, label: Any, metadata: Mapping[str, Any]
    ) -> Grade:
        """Grade one answer that `registry.check_inputs` has passed.

        Raises:
            GraderFailure: as of `GraderRunner.grade`.
        """
        try:
            async with self._place(rm_type):
                # At the answer's turn: a thousand that come at once must not all be encoded in one go.
                lines = frames.request(rm_type, response, label, metadata, conversation=spec.conversation)
                outcome = frames.read_reply(await self._run(rm_type, lines))
        except _Exhausted as failure:
            return exhausted(spec, failure)
        if isinstance(outcome, Grade):
            return outcome
        if outcome.kind == "grader_out_of_memory":
            return exhausted(spec, outcome)
        raise outcome

    def close(self) -> None:
        """End all processes; answers in flight get `grader_closed`."""
        self._closed = True
        for worker in (*self._idle, *self._busy):
            worker.kill()
        self._idle.clear()
        self._nursery.close()

    def __del__(self) -> None:
        # While the interpreter shuts down nothing can be called safely; the kernel ends the workers with it.
        if not self._closed and not sys.is_finalizing():
            self.close()

    async def _run(self, rm_type: str, lines: Iterator[bytes]) -> bytes:
        worker = await self._worker(rm_type)
        self._busy.add(worker)
        try:
            reply = await self._ask(worker, rm_type, lines)
        except BaseException:
            worker.kill()
            raise
        finally:
            self._busy.discard(worker)
        if self._closed or worker.done >= self._settings.grader_recycle:
            worker.kill()
        else:
            self._idle.append(worker)
        return reply

    async def _ask(self, worker: WorkerProcess, rm_type: str, lines: Iterator[bytes]) -> bytes:
        """The worker's reply, or the failure that there is none."""
        timeout = self._settings.grader_timeout
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
        longest = self._settings.grader_total_timeout
        try:
            with anyio.fail_after(longest):
                await self._free.acquire()
        except TimeoutError as error:
            raise GraderFailure(
                f"--rm-type {rm_type}: no worker was free for {longest:g} s; more of them: --grader-processes",
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
        self.forked += 1
        return await self._nursery.fork()

    def _check_open(self, cause: BaseException | None) -> None:
        if self._closed:
            raise GraderFailure("the grader pool is closed", kind="grader_closed") from cause


class _Exhausted(GraderFailure):
    """Grading the answer took more time, memory or stack than there is."""
