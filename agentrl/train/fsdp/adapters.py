"""Adapters in a model that is trained: parameters beside a layer's weight, sharded and saved like others.

1. `adapt` leaves only adapters to learn. Their B is 0, so that the model is at first as it was.
2. Parameters are called as PEFT calls them: `<layer>.lora_A.weight`, `<layer>.lora_B.weight`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from agentrl.lora import LoraShape, attach


def adapt(model: Any, shape: LoraShape) -> None:
    """Give a model of transformers its adapters."""
    model.requires_grad_(False)
    model.adapters_on = True
    for layer in shape.layers(model).values():
        like: dict[str, Any] = {"bias": False, "device": layer.weight.device, "dtype": layer.weight.dtype}
        a = torch.nn.Linear(layer.in_features, shape.rank, **like)
        b = torch.nn.Linear(shape.rank, layer.out_features, **like)
        torch.nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
        torch.nn.init.zeros_(b.weight)
        layer.lora_A, layer.lora_B = a, b
        attach(layer, a, b, shape.scale, lambda: bool(model.adapters_on))


@contextmanager
def off(model: Any) -> Iterator[None]:
    """The model computes without its adapters."""
    model.adapters_on = False
    try:
        yield
    finally:
        model.adapters_on = True


def adapter_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Those parameters that belong to adapters."""
    return {name: parameter for name, parameter in parameters.items() if ".lora_" in name}


def merged(name: str, weight: Tensor, adapter: Mapping[str, Tensor], scale: float) -> Tensor:
    """A layer's weight with its adapter added to it, in float32; any other weight as it is."""
    layer = name.removesuffix(".weight")
    if (a := adapter.get(f"{layer}.lora_A.weight")) is None:
        return weight
    return weight.float() + scale * (adapter[f"{layer}.lora_B.weight"].float() @ a.float())
