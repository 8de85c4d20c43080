"""The rollout runner: leases groups, plays many at once, and records what became of each, for as long as the run lives.

1. Structured: every group in play is a task of the runner's task group. Leaving the runner leaves nothing running.
2. A group is kept, or dropped with a reason, or given back, as a whole; the store (the ledger) is told before another
   one starts. The store writes durably, so it is called in a worker thread, one that nobody else needs.
3. `Admission` decides how many groups may start. One task, the pump, leases them: while a batch is being filled and, in
   an asynchronous run, while the trainer works on the one before. So a caller that is cancelled strands no lease.
4. Whatever a group raises ends the batch, which then leaves nothing in play.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar, TypeVarTuple

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from agentrl.errors import AgentRLError, ungrouped
from agentrl.groups import Group, GroupStore
from agentrl.rollout.admission import Admission
from agentrl.rollout.failures import DropGroup
from agentrl.rollout.filters import GroupFilter, mask_older, named_filter, reason_to_drop
from agentrl.rollout.group import GroupPlayer, group_id
from agentrl.rollout.stats import Account, RolloutStats, Tokens
from agentrl.rollout.teacher import teach

T = TypeVar("T")
Args = TypeVarTuple("Args")

STALE = "too old"
"""Why the ledger says that a group was dropped or is made again."""

BROKEN_OFF = "broken off"
"""Why it says so of a group that was in play when the run was stopped or failed."""


@dataclass(slots=True)
class _Playing:
    """A group in play; `played` is what came of it, before anything was decided."""

    version: int
    left: int
    played: Group = field(default_factory=list)
    stats: RolloutStats = field(default_factory=RolloutStats)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class RolloutRunner:
    """Plays groups of a store; made by `running`."""

    def __init__(
        self, player: GroupPlayer, store: GroupStore, group_filter: GroupFilter | None, tasks: TaskGroup
    ) -> None:
        self._settings = player.context.settings
        s, target = self._settings, self._settings.rollout_batch_size
        self._admission = Admission(
            target,
            max(target, s.over_sampling_batch_size or target) - target,
            s.max_staleness,
            places=s.rollout_max_concurrency,
            size=s.n_samples_per_prompt,
            steps=s.num_rollout,
            between=s.max_staleness > 0 and not s.partial_rollout,
            ageless=s.mask_offpolicy_in_partial_rollout,
        )
        self._player, self._store, self._filter, self._tasks = player, store, group_filter, tasks
        self._playing: dict[int, _Playing] = {}
        self._thread, self._recording = anyio.CapacityLimiter(1), anyio.Lock()
        self._ended, self._stats, self._since = Tokens(), RolloutStats(), time.monotonic()
        self._trained = 0
        self._error: Exception | None = None
        self._dry = False
        self._changed = anyio.Event()

    @classmethod
    @asynccontextmanager
    async def running(
        cls, player: GroupPlayer, store: GroupStore, group_filter: GroupFilter | None = None, carried: int = 0
    ) -> AsyncIterator["RolloutRunner"]:
        """A runner with the task group that its groups are played in.

        Args:
            carried: tokens of groups that the store has from an earlier life.
        """
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                runner = cls(player, store, group_filter, tasks)
                runner._ended.generated = carried
                tasks.start_soon(runner._pump)
                try:
                    yield runner
                finally:
                    # `batch` may be waiting in another task.
                    runner._fail(AgentRLError("the rollout runner was closed"))
                    tasks.cancel_scope.cancel()

    async def batch(self, step: int) -> tuple[list[Group], RolloutStats]:
        """The groups of training step `step`, when they are all there, or when the data has ended, and the counts.

        They are in the data's order: which was finished first must not decide how gradients are summed.

        Raises:
            Failure: a failure's policy stops the run.
            AgentRLError: group after group was dropped; or the store, the filter or the grader cannot go on.
        """
        self._dry = False
        try:
            if self._error is None:
                await self._begin(step)
            while self._error is None and not self._admission.full and not self._dry:
                await self._changed.wait()
            if self._error is not None:
                raise self._error
            groups = await self._hand_over(step)
        except BaseException:
            self._error = None
            self._admission.close()
            with anyio.CancelScope(shield=True):
                await self._give_back(lambda group: True)
            raise
        stats, self._stats = self._stats, RolloutStats()
        return sorted(groups, key=group_id), stats

    def updated(self, version: int) -> None:
        """The engines sample with weights that `version` rollouts have trained, from now on."""
        self._admission.updated(version)
        self._notify()

    # ---- batches ------------------------------------------------------------------------------------------

    async def _begin(self, step: int) -> None:
        if self._settings.partial_rollout:
            await self._player.context.client.release()
        async with self._recording:
            self._admission.begin(step)
            again = self._settings.stale_groups == "remake"
            tokens = await self._write(self._store.expire, self._admission.oldest, STALE, again)
            self._ended.lose(STALE, tokens)
            self._admission.wait((await self._write(self._store.kept, step)).groups)
        if not self._admission.between:
            self._since = time.monotonic()
        self._notify()

    async def _hand_over(self, step: int) -> list[Group]:
        async with self._recording:
            groups = await self._write(self._store.next_batch, self._admission.batch, step)
            if (oldest := self._oldest_trained(step)) is not None:
                for sample in (sample for group in groups for sample in group):
                    self._ended.lose("off-policy", mask_older(sample, oldest))
            self._trained += sum(sample.trained_tokens for group in groups for sample in group)
            self._admission.handed()
            kept = await self._write(self._store.kept, step + 1)
            self._admission.wait(kept.groups)
            self._stats.account = self._account(kept.tokens)
        self._notify()
        now = time.monotonic()
        self._stats.seconds, self._since = now - self._since, now
        if self._settings.partial_rollout:
            await self._player.context.client.hold()
        with anyio.CancelScope(shield=True):
            await self._give_back(lambda group: self._admission.stale(group.version))
        return groups

    def _oldest_trained(self, step: int) -> int | None:
        """The weights before which no token is trained, where the settings mask some."""
        if self._settings.mask_offpolicy_in_partial_rollout:
            return self._admission.version
        return None if self._settings.mask_staleness is None else step - self._settings.mask_staleness

    def _account(self, kept: int) -> Account:
        total, playing = Tokens(), [group.stats.tokens for group in self._playing.values()]
        for part in (self._ended, *playing):
            total.add(part)
        return Account(total.generated, self._trained, kept + sum(part.left for part in playing), total.lost)

    async def _give_back(self, which: Callable[[_Playing], bool]) -> None:
        """Break off groups in play; returns when they are given back."""
        async with self._recording:  # a lease under way is given back too
            chosen = {number: group for number, group in self._playing.items() if which(group)}
        for group in chosen.values():
            group.scope.cancel()
        while any(self._playing.get(number) is group for number, group in chosen.items()):  # it may be leased again
            await self._changed.wait()

    # ---- groups -------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        """Start groups whenever some may start."""
        while True:
            changed = self._changed
            try:
                await self._refill()
            except Exception as error:  # noqa: BLE001 - raised by `batch`
                self._fail(error)
            await changed.wait()

    async def _refill(self) -> None:
        with anyio.CancelScope(shield=True):
            async with self._recording:
                if not (wanted := self._admission.wanted):
                    return
                leased: list[Group] = await self._write(self._store.lease, wanted, self._admission.version)
                for group in leased:
                    playing = _Playing(self._admission.started(), self._admission.size)
                    self._playing[group_id(group)] = playing
                    self._tasks.start_soon(self._play, group, playing)
        if not leased and not self._playing:
            self._dry = True
            self._notify()

    async def _play(self, leased: Group, playing: _Playing) -> None:
        outcome: Group | None = None
        reason: str | None = None

        def ended() -> None:
            playing.left -= 1
            self._admission.ended()
            self._notify()

        try:
            with playing.scope:
                played = await self._player.group(leased, evaluation=False, stats=playing.stats, ended=ended)
                playing.played = played
                self._player.context.hooks.played(played)
                reason = reason_to_drop(played, self._filter, self._player.context.args, self._admission.scarce)
                if reason is None:
                    await teach(played, self._player.context, playing.stats)
                outcome = played if reason is None else None
        except DropGroup as drop:
            reason = drop.reason
        except Exception as error:  # noqa: BLE001 - raised by `batch`, which ends the other groups first
            self._fail(error)
        finally:
            with anyio.CancelScope(shield=True):
                try:
                    async with self._recording:
                        await self._finish(group_id(leased), outcome, reason)
                except Exception as error:  # noqa: BLE001 - raised by `batch`
                    self._fail(error)
                self._notify()

    async def _finish(self, number: int, outcome: Group | None, reason: str | None) -> None:
        """A group is kept (`outcome`), or dropped (`reason`); with neither it was broken off."""
        playing = self._playing[number]
        self._admission.ended(playing.left)
        keep = None if outcome is None and reason is None else outcome is not None
        self._admission.finished(playing.version, keep=keep)
        stats = playing.stats
        try:
            if outcome is not None:
                await self._write(self._store.complete, number, outcome)
                stats.tokens.keep(sum(sample.trained_tokens for sample in outcome))
            elif reason is not None:
                stats.dropped[reason] += 1
                await self._write(self._store.drop, number, reason, playing.played)
                stats.tokens.lose(reason)
            else:
                why = STALE if self._admission.stale(playing.version) else BROKEN_OFF
                drop = why == STALE and self._settings.stale_groups == "drop"
                await self._write(self._store.drop if drop else self._store.release, number, why)
                stats.tokens.lose(why)
        finally:
            del self._playing[number]
            self._stats.add(stats)
            self._ended.add(stats.tokens)
        if self._admission.hopeless:
            raise AgentRLError(_hopeless(self._stats, self._admission.dropped_in_row, self._filter))

    async def _write(self, call: Callable[[*Args], T], *arguments: *Args) -> T:
        return await to_thread.run_sync(call, *arguments, limiter=self._thread)

    def _fail(self, error: Exception) -> None:
        """The first error is what `batch` raises."""
        self._error = self._error or error
        self._admission.close()
        self._notify()

    def _notify(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = anyio.Event()


def _hopeless(stats: RolloutStats, dropped: int, group_filter: GroupFilter | None) -> str:
    reasons = ", ".join(f"{reason} ({count})" for reason, count in stats.dropped.most_common(5))
    last = f"; the last failure was: {stats.last_failure}" if stats.last_failure else ""
    rewards = [row["reward"] for row in stats.offered if "reward" in row]
    if group_filter is not None and rewards:
        saw = f"from {min(rewards):g} to {max(rewards):g}" if min(rewards) < max(rewards) else f"all {rewards[0]:g}"
        last += f"; {named_filter(group_filter)} was asked about {len(rewards)} trajectories, whose rewards were {saw}"
    return f"{dropped} groups in a row were dropped and none was kept, for: {reasons}{last}"
