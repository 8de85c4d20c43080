"""Metrics of a rollout: pure functions over samples and counts."""

from collections.abc import Mapping, Sequence

import numpy as np

from agentrl.groups import Group
from agentrl.rollout import stats as figures
from agentrl.rollout.settings import RolloutSettings
from agentrl.train.batch import TrainBatch


def rollout_metrics(
    groups: Sequence[Group], stats: figures.RolloutStats, settings: RolloutSettings, environments: Sequence[str] = ()
) -> dict[str, float]:
    """Return the metrics of one rollout. `rollout/...`: the kept samples. `offered/...`: all samples finished since
    the previous rollout. `env/<name>/...`: the kept samples of each environment, if there are several. Counts:
    `failures/<blame>/<kind>`, `dropped/<reason>`, and `tokens/...`: generated = trained + waiting + sum of dropped."""
    reward_key = settings.reward_key
    rows = [figures.describe(group, reward_key) for group in groups if group]
    kept = [row for group in rows for row in group]
    metrics = {f"rollout/{name}": value for name, value in figures.means(kept).items()}
    if stats.offered:  # otherwise there is no mean
        metrics.update({f"offered/{name}": value for name, value in figures.means(stats.offered).items()})
    metrics |= figures.by_environment(groups, reward_key, environments)
    rewards = [[s.get_reward_value(reward_key) for s in group] for group in groups if group]
    first = [sample for group in groups for sample in figures.heads(group)]
    metrics["rollout/reward"] = figures.mean([sample.get_reward_value(reward_key) for sample in first])
    metrics["rollout/zero_std_groups"] = figures.mean([max(values) - min(values) < 1e-9 for values in rewards])
    if min(map(len, rows), default=0) > 1:
        earned = [[row.get("reward", 0.0) for row in group] for group in rows]
        metrics["rollout/reward_standard_error"] = figures.standard_error(earned)
    found = figures.pass_rates(rows) | figures.speculation([sample for group in groups for sample in group])
    if settings.log_reward_category is not None and first:
        found |= figures.categories(first, settings.log_reward_category)
    metrics |= {f"rollout/{name}": value for name, value in found.items()}
    metrics |= {"rollout/groups": float(len(groups)), "rollout/retries": float(stats.retries)}
    metrics |= _counts("failures", stats.failures) | _counts("dropped", stats.dropped)
    metrics["perf/rollout_seconds"] = stats.seconds
    if stats.tokens.generated:  # otherwise all samples were ready before the rollout was requested
        metrics["perf/rollout_tokens_per_second"] = stats.tokens.generated / stats.seconds
    account = stats.account
    metrics |= {f"tokens/{name}": float(getattr(account, name)) for name in ("generated", "trained", "waiting")}
    return metrics | _counts("tokens/dropped", account.lost)


def staleness_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return the age, in rollouts, of the weights that sampled the trained tokens. Names: `staleness/mean`,
    `staleness/max`, and `staleness/share_<n>`: the share of tokens of age n. Tokens of unknown version do not count."""
    ages = batch.staleness[batch.staleness >= 0]
    if not ages.size:
        return {}
    found = {f"staleness/share_{age}": float(share) for age, share in enumerate(np.bincount(ages) / ages.size)}
    return {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())} | found


def truncation_metrics(batch: TrainBatch, settings: RolloutSettings) -> dict[str, float]:
    """Return the effect of top-p and top-k on the trained tokens; empty if sampling was not truncated. Names:
    `truncation/kept`: mean size of the sampling support. `truncation/biased`: 1 if the trainer does not know the
    sampling support (`--allow-truncated-sampling`)."""
    found = {"truncation/biased": 1.0} if settings.allow_truncated_sampling else {}
    if batch.support_offsets is not None and (trained := batch.loss_mask.astype(bool)).any():
        found["truncation/kept"] = float(np.diff(batch.support_offsets)[trained].mean())
    return found


def _counts(what: str, counts: Mapping[str, int]) -> dict[str, float]:
    return {f"{what}/{name}": float(count) for name, count in counts.items()}
