"""The rollout runner: leases groups, plays many at once, and records what became of each, for as long as the run lives.

1. Structured: every group in play is a task of the runner's task group. Leaving the runner leaves nothing running.
2. A group is kept, or dropped with a reason, or given back, as a whole; the store (the ledger) is told before another
   one starts. The store writes durably, so it is called in a worker thread.
3. `Admission` decides how many groups may start. Whatever a group raises ends `fill`, which then leaves nothing in play.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from agentrl.errors import AgentRLError, ungrouped
from agentrl.groups import Group, GroupStore
from agentrl.rollout.admission import Admission
from agentrl.rollout.filters import GroupFilter
from agentrl.rollout.finalize import reason_to_drop
from agentrl.rollout.group import DropGroup, GroupPlayer, RolloutStats, group_id


class RolloutRunner:
    """Plays groups of a store; made by `running`."""

    def __init__(
        self, player: GroupPlayer, store: GroupStore, group_filter: GroupFilter | None, tasks: TaskGroup
    ) -> None:
        settings = player.context.settings
        target = settings.rollout_batch_size
        self._admission = Admission(target, max(target, settings.over_sampling_batch_size or target))
        self._player, self._store, self._filter, self._tasks = player, store, group_filter, tasks
        self._playing: dict[int, anyio.CancelScope] = {}
        self._recording = anyio.Lock()
        self._step, self._stats = 0, RolloutStats()
        self._error: Exception | None = None
        self._settled, self._idle = anyio.Event(), anyio.Event()

    @classmethod
    @asynccontextmanager
    async def running(
        cls, player: GroupPlayer, store: GroupStore, group_filter: GroupFilter | None = None
    ) -> AsyncIterator["RolloutRunner"]:
        """A runner with the task group that its groups are played in."""
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                runner = cls(player, store, group_filter, tasks)
                try:
                    yield runner
                finally:
                    runner._admission.end()  # `fill` may be waiting in another task
                    tasks.cancel_scope.cancel()

    async def fill(self, step: int, have: int = 0) -> RolloutStats:
        """Play until the batch of `step` is full, or the data has ended; the groups are in the store.

        Args:
            step: the training step that the groups are for.
            have: groups of the batch that are there already, from an earlier life of the run.

        Raises:
            Failure: a failure's policy stops the run.
            AgentRLError: group after group was dropped; or the store, the filter or the grader cannot go on.
        """
        began = time.monotonic()
        self._step, self._stats, self._error = step, RolloutStats(), None
        self._settled, self._idle = anyio.Event(), anyio.Event()
        self._admission.begin(have)
        try:
            self._tasks.start_soon(self._record)
            await self._settled.wait()
        finally:
            self._admission.end()
            for scope in self._playing.values():
                scope.cancel()
            with anyio.CancelScope(shield=True):
                async with self._recording:  # a lease under way is given back
                    pass
                if self._playing:
                    await self._idle.wait()
        if self._error is not None:
            raise self._error
        self._stats.seconds = time.monotonic() - began
        return self._stats

    async def _play(self, leased: Group) -> None:
        outcome: Group | None = None
        reason: str | None = None
        try:
            with self._playing[group_id(leased)]:
                played = await self._player.group(leased, evaluation=False, stats=self._stats)
                reason = reason_to_drop(played, self._filter, self._player.context.args)
                outcome = played if reason is None else None
        except DropGroup as drop:
            reason = drop.reason
        except Exception as error:  # noqa: BLE001 - raised by `fill`, which ends the other groups first
            self._fail(error)
        finally:
            with anyio.CancelScope(shield=True):
                await self._record(leased, outcome, reason)

    async def _record(
        self, leased: Group | None = None, outcome: Group | None = None, reason: str | None = None
    ) -> None:
        """Record what became of a group, if there is one, and start others in its stead; one at a time."""
        async with self._recording:
            try:
                if leased is not None:
                    await self._finish(group_id(leased), outcome, reason)
                await self._refill()
            except Exception as error:  # noqa: BLE001 - raised by `fill`
                self._fail(error)
        if not self._playing:
            self._idle.set()

    async def _refill(self) -> None:
        wanted = self._admission.wanted
        for group in await to_thread.run_sync(self._store.lease, wanted, self._step) if wanted else ():
            self._admission.started()
            self._playing[group_id(group)] = scope = anyio.CancelScope()
            if not self._admission.open:
                scope.cancel()
            self._tasks.start_soon(self._play, group)
        if self._admission.full or not self._playing:
            self._settled.set()

    async def _finish(self, number: int, outcome: Group | None, reason: str | None) -> None:
        """A group is kept (`outcome`), or dropped (`reason`); with neither it was interrupted."""
        del self._playing[number]
        if not self._admission.takes or (outcome is None and reason is None):
            self._admission.given_back()
            await to_thread.run_sync(self._store.release, number, "not needed in this rollout")
            return
        self._admission.finished(keep=outcome is not None)
        if outcome is not None:
            await to_thread.run_sync(self._store.complete, number, outcome)
        elif reason is not None:
            self._stats.dropped[reason] += 1
            await to_thread.run_sync(self._store.drop, number, reason)
            if self._admission.hopeless:
                raise AgentRLError(_hopeless(self._stats, self._admission.dropped_in_row))

    def _fail(self, error: Exception) -> None:
        """The first error is what `fill` raises."""
        self._error = self._error or error
        self._settled.set()


def _hopeless(stats: RolloutStats, dropped: int) -> str:
    reasons = ", ".join(f"{reason} ({count})" for reason, count in stats.dropped.most_common(5))
    last = f"; the last failure was: {stats.last_failure}" if stats.last_failure else ""
    return (
        f"{dropped} groups in a row were dropped and none was kept, for: {reasons}{last}. "
        "Look at the prompts, the environment and the group filter"
    )
