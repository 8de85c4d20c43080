"""Routing replay: the engine's choice of experts in place of the trainer's (arXiv:2510.11370). Each layer gets its rows
just before it runs, so recomputed and backward passes use the right ones. Scores and gradients stay the trainer's.
Tokens with unknown experts (-1) choose for themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import TrainError


class Replay:
    """A layer's routing: `chosen` int16 [t, experts a token], None where the router is to choose for itself."""

    chosen: Tensor | None = None

    def pick(self, scores: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        """`scores` [t, experts] and numbers of the experts [t, experts a token]; `found` are those of the router itself."""
        chosen = found if self.chosen is None else torch.where(self.chosen < 0, found, self.chosen.long())
        return scores.gather(1, chosen), chosen

    def hand(self, pack: str, layer: int, _module: Any, _args: Any, inputs: Mapping[str, Any]) -> None:
        """Take the routing of layer number `layer` from its input `pack`; a hook that runs before the layer."""
        routing = inputs[pack].routing
        self.chosen = None if routing is None else routing[:, layer]


def routing_of(rows: Tensor, sparse: Sequence[Any], experts: int, topk: int) -> Tensor:
    """Rows [t, layers x topk] as [t, layers, topk]; `sparse`: has a layer experts? Raises TrainError: another model."""
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
