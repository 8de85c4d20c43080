"""Routing replay in megatron's layers, each of which gets the microbatch as `packed_seq_params`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agentrl.train.megatron.model import unwrap
from agentrl.train.routing import Replay


class _Replay(Replay):
    """In the place of megatron's `RouterReplay`, of which there is one list for all the models of a process."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, groups: int | None, group_topk: int | None, choose: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        return self.pick(scores, choose(scores, topk, groups, group_topk)[1])


def replaying(model: torch.nn.Module) -> None:
    """Have the routers of a model read `Pack.routing` from now on."""
    for layer in unwrap(model).decoder.layers:
        if router := getattr(layer.mlp, "router", None):
            router.router_replay = _Replay()
            hand = partial(router.router_replay.hand, "packed_seq_params", layer.layer_number - 1)
            layer.register_forward_pre_hook(hand, with_kwargs=True)
