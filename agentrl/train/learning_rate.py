"""The learning rate as a pure function of the optimizer step.

1. Shapes and numbers are those of Megatron-LM's `OptimizerParamScheduler`, so curves can be compared. Step 0 of a
   warm-up has the rate `lr_warmup_init`, and step `lr_warmup_iters` has the peak.
2. The schedule has no state: a resumed run needs only the number of steps taken."""

import math
from collections.abc import Callable

from agentrl.errors import SettingsError
from agentrl.train.settings import TrainSettings


def learning_rate(step: int, settings: TrainSettings, total_steps: int | None = None) -> float:
    """Return the learning rate of optimizer step `step` (from 0). Without `lr_decay_iters` the decay ends at
    `total_steps`. Raises SettingsError: an end is needed and unknown, or the warm-up is not shorter than the decay."""
    decay_end = end_of_decay(settings, total_steps)
    warmup = _warmup_steps(settings, decay_end)
    if settings.lr_decay_style != "constant" and decay_end is not None and warmup >= decay_end:
        raise SettingsError(f"the warm-up of {warmup} steps must be shorter than the {decay_end} steps of the decay")
    if warmup and step <= warmup:
        return settings.lr_warmup_init + (settings.lr - settings.lr_warmup_init) * step / warmup
    if settings.lr_decay_style == "constant":
        return settings.lr
    if decay_end is None:
        raise SettingsError(f"lr_decay_style {settings.lr_decay_style} needs lr_decay_iters or the run's length")
    if step > decay_end:
        return settings.min_lr
    if settings.lr_decay_style == "inverse-square-root":
        return max(settings.min_lr, settings.lr * math.sqrt(max(warmup, 1) / max(step, 1)))
    share = _share_of_peak(step, warmup, decay_end, settings)
    return settings.min_lr + share * (settings.lr - settings.min_lr)


def end_of_decay(settings: TrainSettings, total_steps: int | None) -> int | None:
    """Return the optimizer step at which the schedule ends; None if it has no end or the end is unknown."""
    if settings.lr_decay_style == "constant" and settings.lr_warmup_fraction is None:
        return None
    return settings.lr_decay_iters or total_steps


def muon_learning_rate(step: int, settings: TrainSettings, total_steps: int | None = None) -> float:
    """Return the learning rate of Muon's matrices: the same schedule with the peak `muon_lr` (by default `lr`)."""
    if settings.muon_lr is None:
        return learning_rate(step, settings, total_steps)
    scale = settings.muon_lr / settings.lr if settings.lr else 1.0
    rates = {"lr": settings.muon_lr, **{name: getattr(settings, name) * scale for name in ("min_lr", "lr_warmup_init")}}
    return learning_rate(step, settings.model_copy(update=rates), total_steps)


def _warmup_steps(settings: TrainSettings, decay_end: int | None) -> int:
    if settings.lr_warmup_fraction is None:
        return settings.lr_warmup_iters
    if decay_end is None:
        raise SettingsError("lr_warmup_fraction needs lr_decay_iters or the run's length")
    return int(settings.lr_warmup_fraction * decay_end)


def _share_of_peak(step: int, warmup: int, decay_end: int, settings: TrainSettings) -> float:
    if settings.lr_decay_style == "WSD":
        cooldown = settings.lr_wsd_decay_iters or 0
        if (start := decay_end - cooldown) < warmup:
            parts = f"lr_wsd_decay_iters {cooldown} and the warm-up of {warmup} steps"
            raise SettingsError(f"{parts} must fit in the {decay_end} steps of the decay")
        return 1.0 if step <= start else _SHAPES[settings.lr_wsd_decay_style]((step - start) / cooldown)
    return _SHAPES[settings.lr_decay_style]((step - warmup) / (decay_end - warmup))


_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (math.cos(math.pi * x) + 1.0),
    "exponential": lambda x: 2.0 * 0.5**x - 1.0,
    "minus_sqrt": lambda x: 1.0 - math.sqrt(x),
}
"""Megatron-LM's shapes of decay from 1 at 0 to 0 at 1. A whole decay is linear or cosine; WSD's final decay has any."""
