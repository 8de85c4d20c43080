"""Common parts of all backends' optimizers.

1. A step has two halves: `norm` computes the gradients' global norm. If it is finite, `apply` clips and applies them.
2. Every step sets the learning rates from the schedule. They are never read from the optimizer's saved state."""

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
    """Return AdamW's parameter groups: weight decay applies to matrices, not to vectors."""
    found = [(decays, [p for p in parameters if (p.dim() > 1) is decays]) for decays in (True, False)]
    return [{"params": members, "wd_mult": float(decays), **common} for decays, members in found if members]


class Optimizer(ABC):
    """The optimizer of a model. `inner` is the framework's optimizer, for hooks; `parts` are torch's in it."""

    inner: Any
    parts: Sequence[torch.optim.Optimizer]

    def __init__(self, settings: TrainSettings, total_steps: int | None) -> None:
        self.settings, self.total_steps = settings, total_steps

    @abstractmethod
    def norm(self) -> float:
        """Return the global norm of all gradients of the step."""

    @abstractmethod
    def apply(self, norm: float) -> None:
        """Clip the gradients, whose global norm is `norm`, and update the weights."""

    @abstractmethod
    def state(self, weights: dict[str, Any], *, is_loading: bool, reshardable: bool) -> dict[str, Any]:
        """Return the state in the checkpoint's form; `weights` is the model's state. If not `reshardable`, only the
        number of replicas may differ on load. Collective. Raises CheckpointError: the state cannot be stored."""

    @abstractmethod
    def take(self, state: dict[str, Any] | None) -> None:
        """Set a loaded `state`. With None, reset to the state before the first step, with the current weights."""

    def step(self, number: int) -> dict[str, float]:
        """Take optimizer step `number` (from 0); returns `grad_norm` before clipping, and `lr`. Raises TrainError: the
        gradient norm is not finite. The weights are then unchanged."""
        rate = self._set_rates(number)
        norm = self.norm()
        if not math.isfinite(norm):
            raise TrainError(
                f"optimizer step {number}: the gradient norm is {norm}; the weights were not changed. "
                "Look at the batch's log-probs and advantages, or lower the learning rate"
            )
        self.apply(norm)
        return {"grad_norm": norm, "lr": rate}

    @property
    def stepped(self) -> bool:
        """Return true if the optimizer has state, which the first step creates."""
        return any(len(part.state) > 0 for part in self.parts)

    def memory(self) -> list[Tensor]:
        """Return the tensors that persist between steps: master weights and moments."""
        kept = [p for part in self.parts for group in part.param_groups for p in group["params"]]
        states = (value for part in self.parts for entry in part.state.values() for value in entry.values())
        return kept + [value for value in states if torch.is_tensor(value)]

    def reset(self) -> None:
        """Reset moments and step counts to 0; the weights do not change."""
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
            if "betas" in group:  # a loaded state has those of its own run
                group["betas"] = (self.settings.adam_beta1, self.settings.adam_beta2)
                group["eps"] = self.settings.adam_eps
        return rate
