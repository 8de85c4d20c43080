"""Evaluation: the same runner, parser and grader as in training, on prompts that are never trained on."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from agentrl.groups import Group
from agentrl.rollout.failures import DropGroup
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.startup_check import StartupCheck
from agentrl.rollout.stats import SUMMARY, RolloutStats, Tally, by_environment, describe, means, pass_rates
from agentrl.tasks import together


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of an evaluation on one set."""

    name: str
    metrics: dict[str, float]
    """Mean reward, pass@k, lengths, truncation, tool use, per whole trajectory. Names lack the set's name."""
    groups: list[Group] = field(default_factory=list)  # the graded samples, one group per prompt


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The part of an evaluation set that its metrics need."""

    name: str  # the set's name, for the metrics
    settings: RolloutSettings  # the set's settings
    environments: Sequence[str] = ()  # names of its environments
    startup_check: StartupCheck = field(default_factory=StartupCheck)  # watches the first groups of all evaluations


async def evaluate(
    play: Callable[[Group, Tally], Awaitable[Group]], of: Evaluated, prompts: Sequence[Group]
) -> EvalResult:
    """Play every prompt's group and compute the metrics. Raises AgentRLError: all first groups of the set failed, for
    the same reason: no prompt fits, or no trajectory could be graded. `play`: plays a group; see `Player.evaluate`.
    `prompts`: groups of pending samples, `n_samples_per_eval_prompt` each."""
    stats = RolloutStats()

    async def one(group: Group) -> Group:
        nonlocal stats
        tally, graded = Tally(), Group()
        with suppress(DropGroup), of.startup_check.playing(tally):
            graded = await play(group, tally)
        stats += tally.stats
        return graded

    graded = await together(*(partial(one, group) for group in prompts))
    of.startup_check.judge()
    return EvalResult(of.name, _metrics(of, graded, stats), graded)


def counted(of: Evaluated, groups: list[Group]) -> EvalResult:
    """Return the evaluation of groups that a hook has generated and rewarded."""
    return EvalResult(of.name, _metrics(of, groups, RolloutStats()), groups)


def _metrics(of: Evaluated, groups: Sequence[Group], stats: RolloutStats) -> dict[str, float]:
    key = of.settings.eval_reward_key or of.settings.reward_key
    rows = [describe(group, key) for group in groups if group]
    failed = float(len(groups) - len(rows))
    if not rows:
        return {"samples": 0.0, "failed_groups": failed}
    found = means([row for group in rows for row in group])
    names = (*SUMMARY, *(name for name in found if name.startswith(("unjudged/", "agent/"))))
    metrics = {name: found[name] for name in names} | {"samples": float(sum(map(len, rows))), "failed_groups": failed}
    metrics |= {f"failures/{name}": float(count) for name, count in stats.failures.items()}
    return metrics | by_environment(groups, key, of.environments) | pass_rates(rows)
