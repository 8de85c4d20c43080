"""AdamW over a model's parameters, whole or sharded."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.errors import TrainError
from agentrl.train.fsdp.model import Mesh
from agentrl.train.optimizer import Optimizer
from agentrl.train.settings import TrainSettings


def local(tensor: Any) -> Any:
    """This rank's shard of a sharded tensor; another as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class FsdpOptimizer(Optimizer):
    """Torch's AdamW, in float32; vectors do not decay."""

    inner: torch.optim.AdamW

    def __init__(
        self, parameters: Mapping[str, Any], settings: TrainSettings, ranks: Mesh, total_steps: int | None
    ) -> None:
        super().__init__(settings, total_steps)
        if settings.optimizer != "adam":
            raise TrainError(f"optimizer {settings.optimizer}: fsdp has AdamW; --train-backend megatron has both")
        self.ranks, self.learning = ranks, {name: p for name, p in parameters.items() if p.requires_grad}
        chosen: dict[str, Any] = {
            "betas": (settings.adam_beta1, settings.adam_beta2),
            "eps": settings.adam_eps,
            "fused": True,
        }
        groups = [
            {"params": found, "wd_mult": float(decays)}
            for decays in (True, False)
            if (found := [p for p in self.learning.values() if (p.dim() > 1) is decays])
        ]
        self.inner = torch.optim.AdamW(groups, lr=settings.lr, **chosen)
        self.parts = [self.inner]

    def norm(self) -> float:
        gradients = self._gradients()
        squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum().to(self.ranks.device)
        dist.all_reduce(squares, group=self.ranks.shard_group)
        return float(squares.sqrt())

    def apply(self, norm: float) -> None:
        most = self.settings.clip_grad
        if 0 < most < norm:
            torch._foreach_mul_(self._gradients(), most / (norm + 1e-6))
        self.inner.step()

    def _gradients(self) -> list[Tensor]:
        return [local(p.grad) for p in self.learning.values() if p.grad is not None]

    def memory(self) -> list[Tensor]:
        return [local(tensor) for tensor in super().memory()]

    def state(self, weights: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
        if is_loading:
            for p in self.learning.values():
                zeros = {name: torch.zeros_like(p.detach()) for name in ("exp_avg", "exp_avg_sq")}
                self.inner.state[p] = {"step": torch.zeros((), device=p.device), **zeros}
        return {
            f"{name}.{key}": value for name, p in self.learning.items() for key, value in self.inner.state[p].items()
        }

    def take(self, state: dict[str, Any] | None) -> None:
        if state is None:
            self.inner.state.clear()
