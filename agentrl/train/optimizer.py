"""Common parts of all backends' optimizers.

1. A step is in two halves: the gradients' global norm is taken, and only if it is finite are they clipped and applied.
2. Learning rates are set on every step from the schedule; nothing is kept in the optimizer that the schedule owns."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import TrainError
from agentrl.train.learning_rate import learning_rate, muon_learning_rate
from agentrl.train.settings import TrainSettings


def decay_groups(parameters: Iterable[Any], **common: Any) -> list[dict[str, Any]]:
    """AdamW's groups of parameters, in which matrices decay and vectors do not."""
    found = [(decays, [p for p in parameters if (p.dim() > 1) is decays]) for decays in (True, False)]
    return [{"params": members, "wd_mult": float(decays), **common} for decays, members in found if members]


class Optimizer(ABC):
    """Steps a model's weights; `inner` is the framework's optimizer, as hooks get it, `parts` torch's optimizers in it."""

    inner: Any
    parts: Sequence[torch.optim.Optimizer]

    def __init__(self, settings: TrainSettings, total_steps: int | None) -> None:
        self.settings, self.total_steps = settings, total_steps

    @abstractmethod
    def norm(self) -> float:
        """The global norm of all gradients, which are now ready."""

    @abstractmethod
    def apply(self, norm: float) -> None:
        """Clip the gradients, whose norm is given, and step."""

    @abstractmethod
    def state(self, weights: dict[str, Any], *, is_loading: bool, reshardable: bool) -> dict[str, Any]:
        """As the backend's checkpoints take it; `weights` is the model's. If not `reshardable`, it may have a form that loads
        only with other numbers of replicas. Collective. Raises CheckpointError: it has no form."""

    @abstractmethod
    def take(self, state: dict[str, Any] | None) -> None:
        """Take over a loaded `state`, or None: be as before the first step, with the weights as they are now."""

    def step(self, number: int) -> dict[str, float]:
        """Take optimizer step `number` (from 0); returns `grad_norm` before clipping, and `lr`. Raises TrainError: the
        gradient norm is not finite; no weight has changed."""
        rate = self._set_rates(number)
        norm = self.norm()
        if not math.isfinite(norm):
            raise TrainError(
                f"optimizer step {number}: the gradient norm is {norm}; the weights were left as they are. "
                "Look at the batch's log-probs and advantages, or lower the learning rate"
            )
        self.apply(norm)
        return {"grad_norm": norm, "lr": rate}

    @property
    def stepped(self) -> bool:
        """Return true if there is state, which comes with the first step."""
        return any(len(part.state) > 0 for part in self.parts)

    def memory(self) -> list[Tensor]:
        """The state that it keeps from step to step: master weights and moments."""
        kept = [p for part in self.parts for group in part.param_groups for p in group["params"]]
        states = (value for part in self.parts for entry in part.state.values() for value in entry.values())
        return kept + [value for value in states if torch.is_tensor(value)]

    def reset(self) -> None:
        """Go on as at the first step: moments and counts of steps are 0 again, the weights stay."""
        for part in self.parts:
            for values in part.state.values():
                for value in filter(torch.is_tensor, values.values()):
                    value.zero_()
            for group in part.param_groups:
                if "step" in group:
                    group["step"] = 0

    def _set_rates(self, number: int) -> float:
        rate = learning_rate(number, self.settings, self.total_steps)
        muon_rate = muon_learning_rate(number, self.settings, self.total_steps)
        for group in (group for part in self.parts for group in part.param_groups):
            group["lr"] = (muon_rate if group.get("muon") else rate) * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.settings.weight_decay * group.get("wd_mult", 1.0)
            if "betas" in group:  # which a loaded state brings along
                group["betas"] = (self.settings.adam_beta1, self.settings.adam_beta2)
                group["eps"] = self.settings.adam_eps
        return rate
