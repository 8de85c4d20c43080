"""How far the engine's log-probs of trained tokens are from the trainer's, before the rollout's first step.

Tokens that the newest weights sampled show what numerics do (kernels, precision); older ones, what staleness adds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from agentrl.algorithms.base import TokenView, need
from agentrl.algorithms.ops.clipping import MAX_LOG_RATIO
from agentrl.errors import TrainError

PREFIX = "mismatch/"
_PARTS = ("", "numerics_", "staleness_")
_SUMS = ("tokens", "abs_diff", "kl", "ratio", "square")


def mismatch_sums(view: TokenView, *, engine_is_old: bool) -> dict[str, Tensor]:
    """Sums over the view's trained tokens, float64, of which `mismatch_metrics` makes metrics.

    Args:
        engine_is_old: `old_log_probs` are the engine's, so that the trainer's are those of the model itself.
    """
    old = view.log_probs.detach() if engine_is_old else view.old_log_probs
    logs = (old - need(view.rollout_log_probs, "rollout_log_probs", "the mismatch")).double()
    ratio = logs.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    values = torch.stack([torch.ones_like(logs), logs.abs(), -logs, ratio, ratio.square()])
    trained = view.loss_mask != 0
    parts = torch.stack([trained, trained & (view.staleness == 0), trained & (view.staleness > 0)])
    sums = torch.where(parts[:, None], values, 0).sum(-1).flatten()
    names = [f"{PREFIX}{part}{name}" for part in _PARTS for name in _SUMS]
    return dict(zip(names, sums, strict=True))


def mismatch_metrics(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of the sums of optimizer steps, means over tokens; nothing of a part without tokens.

    Names: `train_rollout_logprob_abs_diff` of all tokens; `mismatch_kl` (mean of log engine - log trainer),
    and `mismatch_ess`, of the ratios trainer / engine the effective sample size (sum of ratios)^2 / (tokens * sum of
    squares), 1 where both agree; `mismatch_numerics_...` over the tokens of staleness 0 and `mismatch_staleness_...` over
    the older ones, `abs_diff` among them.
    """
    total: dict[str, float] = defaultdict(float)
    for step in steps:
        for name, value in step.items():
            total[name] += value
    found: dict[str, float] = {}
    for part in _PARTS:
        sums = {name: total[f"{PREFIX}{part}{name}"] for name in _SUMS}
        if tokens := sums["tokens"]:
            shown = {name: sums[name] / tokens for name in ("abs_diff", "kl")}
            shown["ess"] = sums["ratio"] ** 2 / (tokens * sums["square"])
            found |= {f"mismatch_{part}{name}": value for name, value in shown.items()}
    if found:
        found["train_rollout_logprob_abs_diff"] = found.pop("mismatch_abs_diff")
    return found


def check_agreement(step: Mapping[str, float], most: float | None) -> None:
    """Refuse the sums of an optimizer step whose mean difference of log-probs is above `most` (None: any will do).

    Raises:
        TrainError: it is.
    """
    tokens = step.get(f"{PREFIX}tokens", 0.0)
    if most is not None and tokens and not (mean := step[f"{PREFIX}abs_diff"] / tokens) <= most:
        raise TrainError(
            f"engine and trainer differ by {mean:.3g} in the mean over the log-probs of {tokens:.0f} trained tokens, and at "
            f"most {most:g} is allowed (--ci-train-rollout-logprob-abs-diff-threshold; 0 under --true-on-policy-mode); the "
            "weights were left as they are"
        )
