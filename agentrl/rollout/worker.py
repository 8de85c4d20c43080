"""Messages between coordinator and workers, and `RolloutWorker`, which plays the groups that it is given.

1. A worker owns all that generation needs: chat, environments, tools, graders, teacher, engine connections, limits on
   trajectories in flight, and the startup check. It has no access to the ledger, to batches or to other workers.
2. The coordinator sends a `Lease`. The worker sends a `LeaseProgress` as trajectories end, and answers with one `Played`.
   Messages are values: neither side changes a message that it got or sent.
3. The group filter runs in the worker, beside the samples. Its verdict also says if the group may be kept when groups
   are scarce. Only the coordinator knows if they are, so the worker finishes each such group (`teach`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import anyio
from anyio import to_thread

from agentrl.buffer.codec import encode_group
from agentrl.errors import AgentRLError
from agentrl.groups import Group
from agentrl.rollout.failures import DropGroup
from agentrl.rollout.filters import FilterOutput, GroupFilter, judged
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.stats import RolloutStats, Tally
from agentrl.rollout.teacher import teach


class WorkerLost(AgentRLError):
    """The death of a worker's process. Another worker can play its groups."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A group to play."""

    number: int  # the lease's number. A group that is leased again gets a new number
    group_id: int  # the ledger's number of the group
    version: int  # weight version under which the group was leased
    group: Group  # its pending samples
    step: int = 0  # the training step whose batch was last begun


@dataclass(frozen=True, slots=True)
class LeaseProgress:
    """Counts of a lease so far, even a cancelled one. `ended`: number of trajectories that gave up their places."""

    lease: int
    ended: int
    summary: RolloutStats


@dataclass(frozen=True, slots=True)
class Played:
    """The result of a lease."""

    lease: int  # the lease's number. The coordinator discards the result of an old lease
    verdict: FilterOutput  # kept, or dropped with a reason
    group: Group = field(default_factory=list)
    """The finished samples. Empty if a failure ended the group, or if another process played a kept group."""
    data: bytes = b""  # the group as the ledger stores it, encoded once; empty if the group cannot be kept
    trained: int = 0  # tokens with mask 1


class Player(Protocol):
    """A worker, or several, as the coordinator sees them."""

    async def play(self, lease: Lease, report: Callable[[LeaseProgress], None]) -> Played:
        """Play a group. Cancelling the call cancels the lease; the last `LeaseProgress` is still reported. Raises
        WorkerLost: the worker died, and the coordinator releases the group. AgentRLError: the run cannot go on."""

    async def evaluate(self, number: int, group: Group, tally: Tally) -> Group:
        """Play and grade a group of evaluation set `number`. Raises DropGroup: by a policy. AgentRLError: as `play`."""

    async def pause(self) -> None:
        """Stop generating until `resume`. Return when no engine generates. Groups in flight keep their tokens."""

    async def resume(self) -> None:
        """Continue generating."""

    async def updated(self, version: int) -> None:
        """Expect tokens of this weight version from now on."""

    async def figures(self) -> Mapping[str, float]:
        """Return metrics of engines, event loop and user code since the last call."""


class RolloutWorker(Player):
    """Plays groups in this process. `player`: plays groups with the settings of training. `group_filter`: judges
    finished groups. `sets`: players of the evaluation sets. `figures`: returns metrics of this process since the last
    call. `check`: raises SampleError for a group that cannot be trained, before it is stored."""

    def __init__(
        self,
        player: GroupPlayer,
        group_filter: GroupFilter | None = None,
        sets: Sequence[GroupPlayer] = (),
        figures: Callable[[], Mapping[str, float]] = dict,
        check: Callable[[Group], None] | None = None,
    ) -> None:
        self.player, self.sets, self._filter, self._figures = player, sets, group_filter, figures
        self._check = check
        self._thread = anyio.CapacityLimiter(1)

    async def play(self, lease: Lease, report: Callable[[LeaseProgress], None]) -> Played:
        tally = Tally(lambda ended, stats: report(LeaseProgress(lease.number, ended, stats)))
        context, group = self.player.context, Group()
        try:
            group = await self.player.group(lease.group, evaluation=False, tally=tally)
            context.hooks.played(group)
            verdict = judged(group, self._filter, context.args)
            if not (verdict.keep or verdict.keep_when_insufficient):
                return Played(lease.number, verdict, group)
            await teach(group, context, tally)
            if self._check is not None:
                self._check(group)
            data = await to_thread.run_sync(encode_group, group, limiter=self._thread)
            return Played(lease.number, verdict, group, data, sum(sample.trained_tokens for sample in group))
        except DropGroup as drop:
            return Played(lease.number, FilterOutput(False, drop.reason), group)
        finally:
            tally.end(0)

    async def evaluate(self, number: int, group: Group, tally: Tally) -> Group:
        return await self.sets[number].group(group, evaluation=True, tally=tally)

    async def pause(self) -> None:
        await self.player.context.client.pause()

    async def resume(self) -> None:
        await self.player.context.client.resume()

    async def updated(self, version: int) -> None:
        self.player.context.client.updated(version)

    async def figures(self) -> Mapping[str, float]:
        return self._figures()
