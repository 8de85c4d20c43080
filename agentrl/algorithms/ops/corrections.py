"""Corrections for tokens that a policy other than the trained one sampled.

1. A token has three policies: the sampling policy (`rollout_log_probs`, as the engine reported them), the old policy
   that clipping keeps the update near (`old_log_probs`, the trainer's own before the rollout's first step), and the
   trained one. Importance weight old / rollout times ratio new / old is new / rollout (arXiv:2110.00641).
2. Weights are constants: no gradient runs through them. They multiply the policy term; KL and entropy keep their own.
3. A rejected token is masked: no term of the loss includes it, but the loss's mean still counts it.
4. Levels: `token` is the token's own ratio, `sequence` the product over its sample's trained tokens, `geometric` their
   geometric mean. Logarithms are bounded by `MAX_LOG_RATIO` before exp."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from agentrl.algorithms.base import TokenView, need
from agentrl.algorithms.fields import AlgorithmFields
from agentrl.algorithms.ops.clipping import MAX_LOG_RATIO
from agentrl.algorithms.own import TIS, is_own, own_importance
from agentrl.errors import SettingsError, TrainError


@dataclass(slots=True)
class Correction:
    """The view with rejected tokens masked, the factor [N] of each token's policy term, statistics; detached."""

    view: TokenView
    weights: Tensor
    stats: dict[str, Tensor] = field(default_factory=dict)


def correct(view: TokenView, settings: AlgorithmFields) -> Correction:
    """Compute the corrections that the settings ask for: importance weights, rejection, off-policy sequence masking.
    Raises TrainError: the view lacks log-probs. PluginError: a user's function returned bad weights."""
    found = Correction(view, torch.ones_like(view.log_probs))
    path = settings.custom_tis_function_path
    here = path is None or is_own(path, TIS)
    if settings.use_tis and here:
        _weigh(found, settings)
    if settings.use_opsm:
        _mask_sequences(found, settings)
    if settings.use_rs and here:
        _reject(found, settings)
    return found


def log_ratio(view: TokenView) -> Tensor:
    """Return log(old / rollout) [N], detached."""
    rollout = need(view.rollout_log_probs, "rollout_log_probs", "an off-policy correction")
    return (view.old_log_probs - rollout).detach()


def at_level(view: TokenView, logs: Tensor, level: str) -> Tensor:
    """Return the ratios [N] at `level`, from the tokens' log-ratios `logs` [N]."""
    if level != "token":
        logs = view.sum_over_sample(logs) if level == "sequence" else view.mean_over_sample(logs)
    return logs.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _weigh(found: Correction, settings: AlgorithmFields) -> None:
    """Set weights by the ratios [N] old / rollout at `tis_level`. truncate: clamped to [tis_clip_low, tis_clip] (TIS,
    https://fengyao.notion.site/off-policy-rl). mask: 0 outside of these bounds (MIS; IcePop, arXiv:2510.18855)."""
    if settings.custom_tis_function_path:
        found.weights = own_importance(found.view, settings)
        found.stats["tis"] = found.weights
        return
    ratio = at_level(found.view, log_ratio(found.view), settings.tis_level)
    held = ratio.clamp(settings.tis_clip_low, settings.tis_clip)
    found.weights = held if settings.tis_mode == "truncate" else ratio * (held == ratio)
    clipped = (found.weights != ratio).to(ratio.dtype)
    found.stats |= {"tis": ratio, "tis_abs": (ratio - 1).abs(), "tis_clipfrac": clipped}


def _mask_sequences(found: Correction, settings: AlgorithmFields) -> None:
    """Drop policy terms where A < 0 and the sample's mean log(rollout / new) > opsm_delta (arXiv:2512.02556, 3.1)."""
    view = found.view
    rollout = need(view.rollout_log_probs, "rollout_log_probs", "use_opsm")
    apart = view.mean_over_sample(rollout - view.log_probs.detach())
    masked = (view.advantages < 0) & (apart > settings.opsm_delta)
    found.weights = found.weights.masked_fill(masked, 0)
    found.stats["opsm_clipfrac"] = masked.to(apart.dtype)


def _reject(found: Correction, settings: AlgorithmFields) -> None:
    """Mask ratios outside [rs_lower_bound, rs_upper_bound], and samples with a token ratio below rs_veto_threshold."""
    view, logs = found.view, log_ratio(found.view)
    ratio, upper = at_level(view, logs, settings.rs_level), settings.rs_upper_bound
    low, high = ratio < (settings.rs_lower_bound or 1 / upper), ratio > upper
    rejected = low | high
    found.stats |= {"rs_mask_fraction_low": low.to(logs.dtype), "rs_mask_fraction_high": high.to(logs.dtype)}
    if settings.rs_veto_threshold is not None:
        bad = (logs < math.log(settings.rs_veto_threshold)).to(logs.dtype)
        vetoed = view.sum_over_sample(bad) > 0
        rejected = rejected | vetoed
        found.stats |= {"rs_catastrophic_token_fraction": bad, "rs_catastrophic_seq_fraction": vetoed.to(logs.dtype)}
    found.stats["rs_masked"] = rejected.to(logs.dtype)
    found.view = dataclasses.replace(view, loss_mask=view.loss_mask.masked_fill(rejected, 0))


def token_weights(
    loss_mask: Tensor,
    lengths: Tensor,
    trajectory_ids: Tensor,
    *,
    per_token: bool = False,
    denominator: Literal["live", "all", "constant"] = "live",
    max_length: int | None = None,
) -> Tensor:
    """Return the weight of each response token in the step's loss, [N] float64, zero where the mask [N] is zero.

    per_token=False: all trajectories have equal weight, and so have the trained tokens of a trajectory. A split
    trajectory (samples with the same id [S]) has one weight, spread over the trained tokens of all its samples.
    per_token=True: all trained tokens of the step have equal weight (DAPO's token-level loss, arXiv:2503.14476).

    Args:
        denominator: `live`: trajectories without a trained token do not count. `all`: they count in the mean (GRPO's
            1/G, arXiv:2402.03300), so the weights may sum to less than 1. `constant`: every token weighs 1 /
            (trajectories * max_length), whatever the outcome (Dr. GRPO, arXiv:2503.20783)."""
    mask = loss_mask.double()
    if per_token:
        return mask / mask.sum().clamp(min=1)
    members, member_of_sample = torch.unique(trajectory_ids, return_inverse=True)
    if denominator == "constant":
        if max_length is None:
            raise SettingsError("loss_denominator constant needs loss_max_length, the length that it divides by")
        return mask / (max(len(members), 1) * max_length)
    member_of_token = member_of_sample.repeat_interleave(lengths)
    trained = torch.zeros(len(members), dtype=torch.float64, device=mask.device).index_add(0, member_of_token, mask)
    counted = (trained > 0).sum().clamp(min=1) if denominator == "live" else len(members)
    share = 1 / (trained.clamp(min=1) * counted)
    return mask * share[member_of_token]


PREFIX = "mismatch/"
_PARTS = ("", "numerics_", "staleness_")
_SUMS = ("tokens", "abs_diff", "kl", "ratio", "square")


def mismatch_sums(view: TokenView, *, engine_is_old: bool) -> dict[str, Tensor]:
    """Return sums over the view's trained tokens, float64, for `mismatch_metrics`. `engine_is_old`: `old_log_probs` are
    the engine's, so the trainer's are `log_probs`."""
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
    """Return means over tokens from the sums of optimizer steps. A part without tokens has no metrics.

    Names: `train_rollout_logprob_abs_diff` over all tokens; `mismatch_kl` (mean of log engine - log trainer);
    `mismatch_ess`, the effective sample size of the ratios trainer / engine, (sum of ratios)^2 / (tokens * sum of
    squares), 1 if both agree. `mismatch_numerics_...` (tokens of staleness 0) and `mismatch_staleness_...` (older
    tokens) also have `abs_diff`."""
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
    """Check the mean difference of log-probs in the sums of an optimizer step. Raises TrainError: the difference is
    above `most` (None: no limit)."""
    tokens = step.get(f"{PREFIX}tokens", 0.0)
    if most is not None and tokens and not (mean := step[f"{PREFIX}abs_diff"] / tokens) <= most:
        raise TrainError(
            f"the log-probs of engine and trainer differ by {mean:.3g} on average over {tokens:.0f} trained tokens; the limit is "
            f"{most:g} (--ci-train-rollout-logprob-abs-diff-threshold; 0 under --true-on-policy-mode). The weights were not "
            "changed"
        )
