"""The coordinator of rollouts: leases groups of the store to a worker, records each result, and hands batches over.

1. A run has one coordinator, in one process. It owns admission and the store (the ledger). It tells the worker when to
   pause and which weights the engines have. The worker reports each lease's result. They share nothing else.
2. A group is completed, dropped with a reason, or released, always as a whole. The store records this before another
   group takes its place. Writes to the store are durable and therefore slow, so they run in threads of their own. Results
   that arrive during a write are recorded together, so that the store can make them durable with one write.
3. `Admission` decides how many groups may start and if a batch is full. One task, the pump, leases all groups: while a
   batch is filled and, in an asynchronous run, while the trainer works on the previous batch.
4. If a lease is cancelled, its group is released, or dropped if it is too old and `stale_groups` is `drop`. A result that still arrives is discarded.
5. If a group raises an error, or the caller of `batch` is cancelled, all groups in flight are given back."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple, TypeVar, TypeVarTuple

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from agentrl.errors import AgentRLError, ungrouped
from agentrl.groups import Group, GroupStore, group_id
from agentrl.rollout.admission import Admission
from agentrl.rollout.filters import mask_older
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.stats import RolloutStats, TokenBalance, Tokens
from agentrl.rollout.worker import Lease, LeaseProgress, Played, Player, WorkerLost

T = TypeVar("T")
Args = TypeVarTuple("Args")
STALE = "too old"  # the ledger's reason for a group that was dropped or is generated again because of its age
INTERRUPTED = "interrupted"  # the ledger's reason for a group that was in flight when the run stopped or failed
_AT_ONCE = 64  # maximum number of results that are recorded at once
LOST = "worker lost"  # the ledger's reason for a group whose worker died
MAX_LOSSES = 5  # a group whose worker died this often is dropped: the group may be the cause


class Rollout(NamedTuple):
    """The groups of a training step in the data's order, with statistics. `full` is false if the data ended first."""

    groups: list[Group]
    stats: RolloutStats
    full: bool


@dataclass(slots=True)
class _InFlight:
    """A lease in flight, with the progress that the worker reported last. `lost`: the worker died."""

    lease: Lease
    lost: bool = False
    ended: int = 0
    stats: RolloutStats = field(default_factory=RolloutStats)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class RolloutCoordinator:
    """The link between a store of groups and the player (one or more workers) that generates them; see `running`."""

    def __init__(
        self, player: Player, store: GroupStore, settings: RolloutSettings, filter_name: str, tasks: TaskGroup
    ) -> None:
        s, target = settings, settings.rollout_batch_size
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
        self._settings, self._player, self._store, self._tasks = settings, player, store, tasks
        self._filter_name, self._numbers = filter_name, count()
        self._flying: dict[int, _InFlight] = {}
        self._threads, self._recording = anyio.CapacityLimiter(_AT_ONCE), anyio.Lock(fast_acquire=True)
        self._results: list[tuple[_InFlight, Played | None]] = []
        self._ended, self._stats, self._account = Tokens(), RolloutStats(), TokenBalance()
        self._since, self._seconds = time.monotonic(), 0.0
        self._trained = self._step = 0
        self._losses = Counter[int]()  # by group
        self._error: Exception | None = None
        self._data_ended = False
        self._changed = anyio.Event()

    @classmethod
    @asynccontextmanager
    async def running(
        cls, player: Player, store: GroupStore, settings: RolloutSettings, filter_name: str = "", carried: int = 0
    ) -> AsyncIterator["RolloutCoordinator"]:
        """Run a coordinator, with a task for each lease, until the block ends. `filter_name`: the group filter, for
        messages. `carried`: number of tokens in finished groups that an earlier process left in the store."""
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                coordinator = cls(player, store, settings, filter_name, tasks)
                coordinator._ended = Tokens(carried)
                tasks.start_soon(coordinator._pump)
                try:
                    yield coordinator
                finally:
                    # Wake a `batch` call that waits in another task.
                    coordinator._fail(AgentRLError("the rollout coordinator was closed"))
                    tasks.cancel_scope.cancel()

    async def batch(self, step: int) -> Rollout:
        """Return the groups of training step `step`. First lets groups of this step start. Then waits until the batch
        is full, the data has ended, or a group failed. Groups come in the data's order, so gradients are summed in the
        same order in every run. Raises Failure: its policy stops the run. AgentRLError: too many groups in a row were
        dropped; store, filter or grader failed."""
        try:
            if self._error is None:
                await self._begin(step)
            while self._error is None and not self._admission.full and not self._data_ended:
                await self._changed.wait()
            if self._error is not None:
                raise self._error
            full = self._admission.full
            groups = await self._hand_over(step)
        except BaseException:
            self._error = None
            self._admission.close()
            with anyio.CancelScope(shield=True):
                await self._give_back(lambda lease: True)
            raise
        stats, self._stats = self._stats, RolloutStats()
        return Rollout(sorted(groups, key=group_id), replace(stats, seconds=self._seconds, account=self._account), full)

    async def updated(self, version: int) -> None:
        """Record that the engines have weights of this version. Later leases get this version."""
        async with self._recording:  # waits for a running `_refill`: its leases get the old version
            self._admission.updated(version)
        self._notify()
        await self._player.updated(version)

    async def _begin(self, step: int) -> None:
        if self._settings.partial_rollout:
            await self._player.resume()
        async with self._recording:
            self._step = step
            self._admission.begin(step)
            regenerate = self._settings.stale_groups == "regenerate"
            expired = await self._write(self._store.expire, self._admission.oldest, STALE, regenerate)
            self._ended = self._ended.lose(STALE, expired.tokens)
            if not regenerate:
                self._stats += RolloutStats(dropped=+Counter({STALE: expired.groups.total()}))
            self._admission.wait((await self._write(self._store.kept, step)).groups)
        if not self._admission.between:
            self._since = time.monotonic()
        self._data_ended = False  # groups that became too old may be leased again
        self._notify()

    async def _hand_over(self, step: int) -> list[Group]:
        async with self._recording:
            groups = await self._write(self._store.next_batch, self._admission.batch, step)
            if (oldest := self._oldest_trained(step)) is not None:
                masked = sum(mask_older(sample, oldest) for group in groups for sample in group)
                self._ended = self._ended.lose("off-policy", masked)
            self._trained += sum(sample.trained_tokens for group in groups for sample in group)
            self._admission.handed()
            kept = await self._write(self._store.kept, step + 1)
            self._admission.wait(kept.groups)
            flying = [flight.stats.tokens for flight in self._flying.values()]
            total, unfinished = sum(flying, self._ended), sum(part.left for part in flying)
            self._account = TokenBalance(total.generated, self._trained, kept.tokens + unfinished, total.lost)
        self._notify()
        now = time.monotonic()
        self._seconds, self._since = now - self._since, now
        if self._settings.partial_rollout:
            await self._player.pause()
        with anyio.CancelScope(shield=True):
            await self._give_back(lambda lease: self._admission.stale(lease.version))
        return groups

    def _oldest_trained(self, step: int) -> int | None:
        """Return the oldest weight version whose tokens are trained; None: there is no limit."""
        if self._settings.mask_offpolicy_in_partial_rollout:
            return self._admission.version
        return None if self._settings.max_token_staleness is None else step - self._settings.max_token_staleness

    async def _give_back(self, which: Callable[[Lease], bool]) -> None:
        """Cancel the leases that `which` selects; return when the store has their groups back."""
        async with self._recording:  # waits for a running `_refill`, to cancel its new leases too
            chosen = {number for number, flight in self._flying.items() if which(flight.lease)}
        for number in chosen & self._flying.keys():
            self._flying[number].scope.cancel()
        while chosen & self._flying.keys():
            await self._changed.wait()

    async def _pump(self) -> None:
        """Lease groups as long as the coordinator runs. After each attempt it waits for a change: a batch was begun or
        handed over, a trajectory or group ended, weights were updated. It wakes `batch` if the data has ended or an
        error occurred."""
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
                    version = self._admission.started()
                    lease = Lease(next(self._numbers), group_id(group), version, group, self._step)
                    self._flying[lease.number] = _InFlight(lease)
                    self._tasks.start_soon(self._play, self._flying[lease.number])
        if not leased and not self._flying:
            self._data_ended = True
            self._notify()

    async def _play(self, flight: _InFlight) -> None:
        """Have the player play one lease, and record the result. Unblocks the pump and `batch`."""
        played: Played | None = None
        try:
            with flight.scope:
                played = await self._player.play(flight.lease, self._progressed)
            if played is not None and (flight.scope.cancel_called or played.lease != flight.lease.number):
                played = None  # the lease was cancelled, or this is the result of an older one
        except WorkerLost:
            flight.lost = True
        except Exception as error:  # noqa: BLE001 - raised by `batch`, which ends the other groups first
            self._fail(error)
        finally:
            with anyio.CancelScope(shield=True):
                self._results.append((flight, played))
                async with self._recording:
                    results, self._results = self._results, []  # empty if another task recorded them
                    if results:
                        async with anyio.create_task_group() as tasks:
                            for result in results:
                                tasks.start_soon(self._record, *result)
                self._notify()

    def _progressed(self, message: LeaseProgress) -> None:
        if (flight := self._flying.get(message.lease)) is not None:
            self._admission.ended(message.ended - flight.ended)
            flight.ended, flight.stats = message.ended, message.summary
            self._notify()

    async def _record(self, flight: _InFlight, played: Played | None) -> None:
        """Keep or drop the group of a lease. Without a result (`played` is None), release or drop the group."""
        lease, stats, number = flight.lease, flight.stats, flight.lease.group_id
        self._admission.ended(self._admission.size - flight.ended)
        rewards = [row["reward"] for row in stats.offered if "reward" in row]
        if flight.lost:
            self._losses[number] += 1
        suspect = flight.lost and self._losses[number] >= MAX_LOSSES
        keep = (False if suspect else None) if played is None else played.verdict.kept(scarce=self._admission.scarce)
        self._admission.finished(lease.version, keep=keep)
        if played is None:
            why = STALE if self._admission.stale(lease.version) else LOST if flight.lost else INTERRUPTED
            drop = suspect or (why == STALE and self._settings.stale_groups == "drop")
            write = self._write(self._store.drop if drop else self._store.release, number, why)
            stats = (stats + RolloutStats(dropped=Counter([why] if drop else []))).lose(why)
        elif keep:
            write = self._write(self._store.complete, number, played.group, played.data, rewards)
            stats = replace(stats, tokens=stats.tokens.keep(played.trained))
        else:
            reason = played.verdict.reason or ""
            write = self._write(self._store.drop, number, reason, played.group, rewards)
            stats = (stats + RolloutStats(dropped=Counter([reason]))).lose(reason)
        self._stats += stats
        self._ended += stats.tokens
        dropped = self._admission.dropped_in_row
        hopeless = self._admission.hopeless and _hopeless(self._stats, dropped, self._filter_name)
        try:
            await write
        except Exception as error:  # noqa: BLE001 - raised by `batch`
            self._fail(error)
        del self._flying[lease.number]
        if hopeless:
            self._fail(AgentRLError(hopeless))

    async def _write(self, call: Callable[[*Args], T], *arguments: *Args) -> T:
        return await to_thread.run_sync(call, *arguments, limiter=self._threads)

    def _fail(self, error: Exception) -> None:
        """Stop admission and wake `batch`, which raises the first error."""
        self._error = self._error or error
        self._admission.close()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _hopeless(stats: RolloutStats, dropped: int, filter_name: str) -> str:
    reasons = ", ".join(f"{reason} ({count})" for reason, count in stats.dropped.most_common(5))
    last = f"; the last failure was: {stats.last_failure}" if stats.last_failure else ""
    if filter_name and (rewards := [row["reward"] for row in stats.offered if "reward" in row]):
        saw = f"from {min(rewards):g} to {max(rewards):g}" if min(rewards) < max(rewards) else f"all {rewards[0]:g}"
        last += f"; {filter_name} judged {len(rewards)} trajectories, whose rewards were {saw}"
    return f"{dropped} groups in a row were dropped; reasons: {reasons}{last}"
