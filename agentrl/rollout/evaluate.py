"""Evaluation: the same runner, parser and grader as in training, on prompts that are never trained on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from agentrl.errors import ungrouped
from agentrl.groups import Group
from agentrl.observability.stats import pass_at_k
from agentrl.rollout.group import DropGroup, GroupPlayer, RolloutStats
from agentrl.sample import Sample, Status

SOLVED = 1.0
"""Least reward that counts as a success in pass@k."""


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


async def evaluate(runner: GroupPlayer, name: str, prompts: Sequence[Group]) -> EvalResult:
    """Play every prompt's group and count.

    Args:
        name: the data set's name, for the metrics.
        prompts: groups of pending samples, `n_samples_per_eval_prompt` each.
    """
    stats = RolloutStats()
    graded: list[Group] = [[] for _ in prompts]

    async def one(at: int, group: Group) -> None:
        try:
            graded[at] = await runner.group(group, evaluation=True, stats=stats)
        except DropGroup as drop:
            stats.dropped[drop.reason] += 1

    with ungrouped():
        async with anyio.create_task_group() as tasks:
            for at, group in enumerate(prompts):
                tasks.start_soon(one, at, group)
    return EvalResult(name, _metrics(runner, graded, stats), graded)


def _metrics(runner: GroupPlayer, groups: Sequence[Group], stats: RolloutStats) -> dict[str, float]:
    settings = runner.context.settings
    key = settings.eval_reward_key or settings.reward_key
    finished = [group for group in groups if group]
    rewards = [[sample.get_reward_value(key) for sample in heads(group)] for group in finished]
    flat = [reward for group in rewards for reward in group]
    played = [siblings for group in finished for siblings in trajectories(group)]
    if not flat:
        return {"samples": 0.0, "failed_groups": float(len(groups))}
    metrics = {
        "reward": sum(flat) / len(flat),
        "samples": float(len(flat)),
        "failed_groups": float(len(groups) - len(finished)),
        "response_length": _mean([sum(s.response_length for s in siblings) for siblings in played]),
        "truncated": _mean([any(s.status is Status.TRUNCATED for s in siblings) for siblings in played]),
        "failed": _mean([any(s.status is Status.FAILED for s in siblings) for siblings in played]),
        "tool_calls": _mean([_counted(siblings, "tool_calls") for siblings in played]),
        **{f"failures/{name}": float(count) for name, count in stats.failures.items()},
        "used_tool": _mean([_counted(siblings, "tool_ok") > 0 for siblings in played]),
    }
    n = min(len(group) for group in rewards)
    k = 1
    while k <= n:
        solved = [sum(r >= SOLVED for r in group) for group in rewards]
        metrics[f"pass@{k}"] = _mean([pass_at_k(len(g), c, k) for g, c in zip(rewards, solved, strict=True)])
        k *= 2
    return metrics


def heads(group: Sequence[Sample]) -> list[Sample]:
    """One sample a trajectory: fan-out siblings share their reward and count once."""
    return [siblings[0] for siblings in trajectories(group)]


def trajectories(group: Sequence[Sample]) -> list[list[Sample]]:
    """A group's samples by trajectory: those that one fanned out into lie together, in order."""
    seen: dict[object, list[Sample]] = {}
    for at, sample in enumerate(group):
        seen.setdefault(("own", at) if sample.rollout_id is None else ("shared", sample.rollout_id), []).append(sample)
    return list(seen.values())


def _counted(siblings: Sequence[Sample], name: str) -> float:
    return float(sum(sample.metadata.get("counters", {}).get(name, 0) for sample in siblings))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
