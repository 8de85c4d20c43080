"""What a rollout looked like, as numbers: pure functions over samples and counts."""

from collections import Counter
from collections.abc import Sequence

from agentrl.rollout.evaluate import heads, trajectories
from agentrl.rollout.group import RolloutStats
from agentrl.sample import Sample, Status


def rollout_metrics(
    groups: Sequence[Sequence[Sample]], stats: RolloutStats, reward_key: str | None
) -> dict[str, float]:
    """Metrics of one rollout: what was trained on, beside what was offered, and what went wrong.

    Names: `rollout/...` for the kept samples, `offered/...` for all that were finished, `failures/<blame>/<kind>`,
    `dropped/<reason>`.
    """
    kept = [sample for group in groups for sample in group]
    rewards = [s.get_reward_value(reward_key) for group in groups for s in heads(group)]
    metrics = {f"rollout/{name}": value for name, value in _describe(kept, reward_key).items()}
    metrics.update({f"offered/{name}": value for name, value in _describe(stats.offered, reward_key).items()})
    # A trajectory that fanned out into several samples counts once, as it does in evaluation.
    metrics["rollout/reward"] = _mean(rewards)
    spreads = [_spread([s.get_reward_value(reward_key) for s in group]) for group in groups if group]
    metrics["rollout/zero_std_groups"] = _mean([spread < 1e-9 for spread in spreads])
    metrics["rollout/groups"] = float(len(groups))
    metrics["rollout/retries"] = float(stats.retries)
    metrics.update({f"failures/{name}": float(count) for name, count in stats.failures.items()})
    metrics.update({f"dropped/{name}": float(count) for name, count in stats.dropped.items()})
    tokens = sum(sum(sample.loss_mask or ()) for sample in stats.offered)
    metrics["perf/rollout_seconds"] = stats.seconds
    metrics["perf/rollout_tokens_per_second"] = tokens / stats.seconds if stats.seconds else 0.0
    return metrics


def _describe(samples: Sequence[Sample], reward_key: str | None) -> dict[str, float]:
    """Means a trajectory: what one fanned out into is added up."""
    played = _trajectories(samples)
    counters = [_counters(siblings) for siblings in played]
    outcomes = sorted({name for counts in counters for name in counts if name.startswith("tool_")} - {"tool_calls"})
    return {
        "reward": _mean([s[0].get_reward_value(reward_key) for s in played if s[0].reward is not None]),
        "response_length": _mean([sum(s.response_length for s in siblings) for siblings in played]),
        "model_tokens": _mean([sum(sum(s.loss_mask or ()) for s in siblings) for siblings in played]),
        "truncated": _mean([any(s.status is Status.TRUNCATED for s in siblings) for siblings in played]),
        "failed": _mean([any(s.status is Status.FAILED for s in siblings) for siblings in played]),
        "turns": _mean([max((part.turn for s in siblings for part in s.segments), default=0) for siblings in played]),
        "tool_calls": _mean([c.get("tool_calls", 0) for c in counters]),
        "used_tool": _mean([bool(c.get("tool_ok", 0)) for c in counters]),
        # How the calls ended, by kind, and their seconds.
        **{name: _mean([c.get(name, 0) for c in counters]) for name in outcomes},
        "non_generation_seconds": _mean([sum(s.non_generation_time for s in siblings) for siblings in played]),
    }


def _trajectories(samples: Sequence[Sample]) -> list[list[Sample]]:
    groups: dict[int | None, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    return [siblings for group in groups.values() for siblings in trajectories(group)]


def _counters(siblings: Sequence[Sample]) -> Counter[str]:
    total: Counter[str] = Counter()
    for sample in siblings:
        total.update(sample.metadata.get("counters", {}))
    return total


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
