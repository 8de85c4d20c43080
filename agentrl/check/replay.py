"""Replay of stored trajectories under a changed grader or environment.

1. The model's turns are the stored ids. Environment, tools and grader are the current ones, with the real agent loop.
2. A trajectory diverges if the environment gives other tokens than before; later turns answer the old tokens.
3. Nothing is written to the store."""

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass

import anyio

from agentrl.chat import Chat
from agentrl.check.findings import difference
from agentrl.check.harness import Harness
from agentrl.check.policy import Recorded
from agentrl.config import RunSettings
from agentrl.errors import AgentRLError, SettingsError
from agentrl.groups import Group, trajectories
from agentrl.rollout.group import GIVEN
from agentrl.sample import RECORDED, Origin, Sample, Status


@dataclass(frozen=True, slots=True)
class ReplayedTrajectory:
    """One trajectory: its stored samples and the results of its replay."""

    stored: Group  # the stored samples, siblings of a split included
    reward: float | None  # the new reward; None if the replay failed
    diverged: str  # description of the first difference in tokens; "" if there is none
    failure: str  # message of the new failure; "" if there is none
    stop_reason: str = ""  # the new stop reason

    @property
    def stopped(self) -> str:
        """The old and the new stop reason, if they differ; "" for a trajectory that was stored without one."""
        then = self.stored[-1].stop_reason
        return f"{then} -> {self.stop_reason}" if then and self.stop_reason not in ("", then) else ""


def replay(
    settings: RunSettings, chat: Chat, groups: Sequence[Group], key: str | None, evaluations: Collection[int] = ()
) -> list[ReplayedTrajectory]:
    """Play and grade all groups again, one by one, in a new event loop. `key`: the entry of dict rewards that counts.
    `evaluations`: indices of the groups of evaluations. Raises AgentRLError: the environment cannot be set up, or
    nothing grades."""

    async def played() -> list[ReplayedTrajectory]:
        async with Harness.opened(settings, chat, 0.0, groups[0][:1]) as stages:
            stage = next((stage for stage in stages if not stage.ungraded), None)
            if stage is None:
                raise SettingsError(stages[0].ungraded)
            again = [await _group(stage, group, key, at in evaluations) for at, group in enumerate(groups)]
            return [trajectory for trajectories in again for trajectory in trajectories]

    return anyio.run(played)


async def _group(stage: Harness, group: Group, key: str | None, evaluation: bool) -> list[ReplayedTrajectory]:
    paths = trajectories(group)
    fresh = [fresh_sample(path[0], at) for at, path in enumerate(paths)]
    pairs = zip(fresh, paths, strict=True)
    told = {sample.index or 0: (recorded_turns(path), _ended(stage.chat, path[-1])) for sample, path in pairs}
    try:
        player = stage.player(Recorded(stage.chat, told), evaluation=evaluation)
        now = trajectories(await player.group(fresh, evaluation=evaluation))
    except AgentRLError as error:
        return [ReplayedTrajectory(path, None, "", str(error)) for path in paths]
    found = []
    for path, again in zip(paths, now, strict=True):
        failure = again[-1].metadata.get("failure", {}).get("message", "")
        reward = None if failure else again[-1].get_reward_value(key)
        before, after = list(path[-1].tokens), list(again[-1].tokens)
        diverged = "" if before == after else difference(stage.chat, before, after, "then", "now")
        found.append(ReplayedTrajectory(path, reward, diverged, failure, again[-1].stop_reason))
    return found


def fresh_sample(stored: Sample, at: int) -> Sample:
    """Return a sample with what the data source gave, `at` the place in its group."""
    metadata = {name: value for name, value in stored.metadata.items() if name not in RECORDED}
    given = {name: getattr(stored, name) for name in GIVEN} | {"index": at if stored.index is None else stored.index}
    return deepcopy(Sample(**given, metadata=metadata))


def _ended(chat: Chat, stored: Sample) -> bool:
    """Return true if the model's last turn was not truncated."""
    wrote = [segment for segment in stored.segments if segment.origin is Origin.MODEL]
    last = stored.tokens[stored.prompt_length + wrote[-1].end - 1] if wrote else None
    cut = stored.stop_reason == "length"  # also if the last allowed token was an end token
    return stored.status is Status.COMPLETED or (last in chat.stop_ids and not cut)


def recorded_turns(path: Group) -> list[list[int]]:
    """Return the ids of each of the model's turns; a turn that a weight update interrupted is in several segments."""
    turns: dict[int, list[int]] = {}
    for sample in path:
        for segment in sample.segments:
            if segment.origin is Origin.MODEL:
                start = sample.prompt_length
                turns.setdefault(segment.turn, []).extend(sample.tokens[start + segment.start : start + segment.end])
    return [turns[number] for number in sorted(turns)]
