"""Routing replay in transformers' layers, each of which gets the microbatch as `pack`.

A mixture of transformers chooses by one `topk` over its experts, which is the only one of its shape; what weighs the chosen
differs from family to family and stays theirs. So that call alone is answered otherwise, while the mixture runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from agentrl.errors import TrainError
from agentrl.train.routing import Replay

_LAYER = re.compile(r"(.*\blayers\.(\d+))\b.*\bexperts")


class _Choosing(TorchFunctionMode):
    def __init__(self, replay: Replay, experts: int) -> None:
        super().__init__()
        self.replay, self.experts, self.used = replay, experts, False

    def __torch_function__(
        self, func: Any, _types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        scores, *_ = args = tuple(args) or (None,)
        out = func(*args, **(kwargs or {}))
        chosen = self.replay.chosen
        if chosen is None or func not in (torch.topk, Tensor.topk) or not isinstance(scores, Tensor):
            return out
        if scores.shape != (len(chosen), self.experts) or out[1].shape != chosen.shape:
            return out
        self.used = True
        return torch.return_types.topk(self.replay.pick(scores, out[1]))


def replaying(model: Any) -> tuple[list[bool], int, int]:
    """Have the mixtures of a model read `Pack.routing` from now on.

    Returns:
        For each layer whether it has experts, how many, and how many a token goes to.
    """
    modules, config = dict(model.named_modules()), model.config
    sparse, experts = [False] * config.num_hidden_layers, 0
    for name, module in modules.items():
        if (place := _LAYER.fullmatch(name)) and not isinstance(module, torch.nn.ModuleList):
            mixture, layer = modules[name.rpartition(".")[0]], int(place[2])
            replay, experts = Replay(), module.num_experts
            modules[place[1]].register_forward_pre_hook(partial(replay.hand, "pack", layer), with_kwargs=True)
            mixture.forward = partial(_forward, mixture.forward, replay, experts)
            sparse[layer] = True
    return sparse, experts, config.num_experts_per_tok if experts else 0


def _forward(forward: Callable[..., Any], replay: Replay, experts: int, *args: Any, **kwargs: Any) -> Any:
    if replay.chosen is None:
        return forward(*args, **kwargs)
    with _Choosing(replay, experts) as choosing:
        out = forward(*args, **kwargs)
    if not choosing.used:
        raise TrainError(
            "this model's mixtures choose their experts otherwise than by one topk over all of them; leave "
            "--use-rollout-routing-replay out, or use --train-backend megatron"
        )
    return out
