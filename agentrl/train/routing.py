"""Routing replay: the trainer uses the experts that the engine chose (arXiv:2510.11370). Layers get their routing just
before they run, so recomputed forward passes use the right rows. For unknown experts (-1) the router chooses."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import TrainError


class Replay:
    """A layer's routing: `chosen` is int16 [t, experts per token], or None if the router chooses."""

    chosen: Tensor | None = None

    def pick(self, scores: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and indices of the chosen experts, [t, experts per token]; `found` is the router's choice."""
        chosen = found if self.chosen is None else torch.where(self.chosen < 0, found, self.chosen.long())
        return scores.gather(1, chosen), chosen

    def hand(self, pack: str, layer: int, _module: Any, _args: Any, inputs: Mapping[str, Any]) -> None:
        """Set `chosen` to the routing of layer number `layer` in its input `pack`; a forward pre-hook of the layer."""
        routing = inputs[pack].routing
        self.chosen = None if routing is None else routing[:, layer]


def routing_of(rows: Tensor, sparse: Sequence[Any], experts: int, topk: int) -> Tensor:
    """Reshape rows to [t, layers, topk]. `sparse`: true for layers with experts. Raises TrainError: rows do not fit."""
    if not topk or rows.shape[1] != len(sparse) * topk:
        raise TrainError(
            f"the samples say {rows.shape[1]} experts a token, and the model has {len(sparse)} layers with {topk} each; does "
            "the engine serve the model of this run?"
        )
    routing = rows.view(-1, len(sparse), topk)
    chosen = routing[:, torch.tensor([bool(has) for has in sparse], device=rows.device)].sort(-1).values
    doubled = (chosen.diff(dim=-1) == 0) & (chosen[..., 1:] >= 0)
    if doubled.any() or (chosen >= experts).any():
        raise TrainError(
            f"rollout_routed_experts must name {topk} different ones of {experts} experts for each layer that has some; does "
            "the engine serve the model of this run?"
        )
    return routing
