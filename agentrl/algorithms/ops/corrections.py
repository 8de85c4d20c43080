"""Corrections for tokens that another policy sampled than the one that is trained.

1. Three policies meet in a token: the one that sampled it (`rollout_log_probs`, as the engine reported them), the one
   that clipping keeps the update near (`old_log_probs`, the trainer's own before the rollout's first step), and the one
   being trained. The importance weight is old / rollout, so that with the ratio new / old the product is new / rollout
   (decoupled PPO, arXiv:2110.00641).
2. Weights are constants: no gradient runs through them. They multiply the policy term; KL and entropy keep their own.
3. A rejected token is masked: no term of the loss sees it, and it stays in the mean that the loss is.
4. Levels: `token` is the token's own ratio, `sequence` the product over its sample's trained tokens, `geometric` their
   geometric mean. Logarithms are bounded by `MAX_LOG_RATIO` before exp.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.algorithms.base import TokenView, need
from agentrl.algorithms.ops.clipping import MAX_LOG_RATIO
from agentrl.algorithms.own import TIS, is_own, own_importance

if TYPE_CHECKING:
    from agentrl.algorithms.fields import AlgorithmFields


@dataclass(slots=True)
class Correction:
    """The view with rejected tokens masked, the factor [N] of each token's policy term, statistics; detached."""

    view: TokenView
    weights: Tensor
    stats: dict[str, Tensor] = field(default_factory=dict)


def correct(view: TokenView, settings: AlgorithmFields) -> Correction:
    """What the settings ask for: importance weights, rejection, off-policy sequence masking.

    Raises:
        TrainError: they need log-probs or advantages that the view lacks.
        PluginError: a function of one's own gave no weights.
    """
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
    """log(old / rollout) [N], detached."""
    rollout = need(view.rollout_log_probs, "rollout_log_probs", "an off-policy correction")
    return (view.old_log_probs - rollout).detach()


def at_level(view: TokenView, logs: Tensor, level: str) -> Tensor:
    """The ratios [N] of a level, of log-ratios [N] of the tokens."""
    if level != "token":
        logs = view.sum_over_sample(logs) if level == "sequence" else view.mean_over_sample(logs)
    return logs.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _weigh(found: Correction, settings: AlgorithmFields) -> None:
    """The weights [N] that `tis_mode` makes of the ratios [N] old / rollout at `tis_level`.

    truncate: clamped to [tis_clip_low, tis_clip] (TIS, https://fengyao.notion.site/off-policy-rl). mask: 0 outside of
    these bounds (MIS; IcePop, arXiv:2510.18855).
    """
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
    """No policy term where A < 0 and the sample's mean log(rollout / new) exceeds opsm_delta (arXiv:2512.02556, 3.1)."""
    view = found.view
    rollout = need(view.rollout_log_probs, "rollout_log_probs", "use_opsm")
    apart = view.mean_over_sample(rollout - view.log_probs.detach())
    masked = (view.advantages < 0) & (apart > settings.opsm_delta)
    found.weights = found.weights.masked_fill(masked, 0)
    found.stats["opsm_clipfrac"] = masked.to(apart.dtype)


def _reject(found: Correction, settings: AlgorithmFields) -> None:
    """Mask what lies outside [rs_lower_bound, rs_upper_bound], and samples with a token below rs_veto_threshold."""
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
