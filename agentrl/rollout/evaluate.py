"""Evaluation: the same runner, parser and grader as in training, on prompts that are never trained on."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import anyio

from agentrl.errors import ungrouped
from agentrl.groups import Group
from agentrl.rollout.failures import DropGroup
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.stats import SUMMARY, RolloutStats, Tally, by_environment, describe, means, pass_rates


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One data set's evaluation.

    Attributes:
        metrics: mean reward, pass@k, lengths, truncation, tool use, all of whole trajectories; names without the data
            set's.
        groups: the graded samples, one group a prompt.
    """

    name: str
    metrics: dict[str, float]
    groups: list[Group] = field(default_factory=list)


async def evaluate(player: GroupPlayer, name: str, prompts: Sequence[Group]) -> EvalResult:
    """Play every prompt's group and count.

    Args:
        name: the data set's name, for the metrics.
        prompts: groups of pending samples, `n_samples_per_eval_prompt` each.

    Raises:
        AgentRLError: no prompt fitted, or the reward failed for all of them, and no evaluation graded any before.
    """
    stats = RolloutStats()
    graded: list[Group] = [[] for _ in prompts]

    async def one(at: int, group: Group) -> None:
        nonlocal stats
        tally = Tally()
        with suppress(DropGroup):
            graded[at] = await player.group(group, evaluation=True, tally=tally)
        stats += tally.stats

    with ungrouped():
        async with anyio.create_task_group() as tasks:
            for at, group in enumerate(prompts):
                tasks.start_soon(one, at, group)
    player.eval_startup_check.judge()
    return EvalResult(name, _metrics(player, graded, stats), graded)


def counted(player: GroupPlayer, name: str, groups: list[Group]) -> EvalResult:
    """The evaluation of groups that others played and rewarded."""
    return EvalResult(name, _metrics(player, groups, RolloutStats()), groups)


def _metrics(player: GroupPlayer, groups: Sequence[Group], stats: RolloutStats) -> dict[str, float]:
    settings = player.context.settings
    key, environments = settings.eval_reward_key or settings.reward_key, player.context.environments
    rows = [describe(group, key) for group in groups if group]
    failed = float(len(groups) - len(rows))
    if not rows:
        return {"samples": 0.0, "failed_groups": failed}
    found = means([row for group in rows for row in group])
    names = (*SUMMARY, *(name for name in found if name.startswith(("unjudged/", "agent/"))))
    metrics = {name: found[name] for name in names} | {"samples": float(sum(map(len, rows))), "failed_groups": failed}
    metrics.update({f"failures/{name}": float(count) for name, count in stats.failures.items()})
    metrics |= by_environment(groups, key, environments.names if environments else ())
    return metrics | pass_rates(rows)
