"""LoRA adapters in megatron's layers: A and B for each linear layer of Hugging Face, some of which megatron joins.

1. If tensor parallelism shards a layer's outputs, B is sharded; if its inputs, A. The other and A's output are whole.
2. Experts get no adapters, as in transformers, which keeps experts in one tensor.
3. Checkpoints have PEFT's names and full shapes, so that they load under every layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint, unwrap_model
from torch import Tensor

from agentrl.errors import TrainError
from agentrl.lora import LoraShape, start
from agentrl.train.megatron.families import ShardLayout as Joined
from agentrl.train.megatron.weights import WeightEntry, WeightMap

_LINEAR = {Joined.ROWS, Joined.COLUMNS, Joined.GATED, Joined.JOINED, Joined.QKV}


def linear_layers(entries: Iterable[WeightEntry]) -> dict[str, tuple[WeightEntry, int]]:
    """Return the layers that may have an adapter: name -> the entry, and the layer's place in the entry."""
    return {
        name.removesuffix(".weight"): (entry, number)
        for entry in entries
        if entry.rule.layout in _LINEAR and not entry.rule.of_expert
        for number, name in enumerate(entry.names)
        if name.endswith(".weight")
    }


def adapt(model: torch.nn.Module, weights: WeightMap, lora: LoraShape, seed: int) -> dict[str, Adapter]:
    """Freeze the model and add adapters; returns this stage's adapters by layer name. Raises CheckpointError: a target
    matches no layer. TrainError: a pipeline stage has no target."""
    inner = unwrap_model(model)
    inner.requires_grad_(False)
    inner.adapters_on = True
    linear = linear_layers(weights.entries)
    chosen = {name: linear[name] for name in lora.chosen(linear)}
    if idle := sorted(set(range(weights.layout.pp)) - {entry.stage for entry, _ in chosen.values()}):
        raise TrainError(f"--target-modules {' '.join(lora.targets)}: pipeline stage {idle[0]} has no such layer")
    found = {}
    for name, (entry, number) in chosen.items():
        if weights.is_mine(entry):
            layer = inner.get_submodule(entry.parameter.removesuffix(".weight"))
            a = start(name, lora.rank, weights.made[entry.kind][number][0][1], seed)
            found[name] = Adapter(layer, a, lora.scale, weights, entry, number)
            layer.add_module(f"lora_{number}", found[name])
            layer.register_forward_hook(
                lambda _, inputs, out, add=found[name].add: add(inputs[0], out) if inner.adapters_on else out
            )
    return found


class Adapter(torch.nn.Module):
    """The adapter of one Hugging Face layer, the one at index `number` among the layers that an entry joins.

    Attributes:
        inward: true if tensor parallelism shards the inputs of the layer, false if it shards the outputs.
        a: [rank, in]; only this rank's inputs if inputs are sharded.
        b: [parts, out / parts, rank]; only this rank's outputs if outputs are sharded; 2 parts for gate and up.
        columns: the indices of this layer's outputs among those of megatron's layer; None: all."""

    def __init__(
        self, layer: Any, a: Tensor, scale: float, weights: WeightMap, entry: WeightEntry, number: int
    ) -> None:
        super().__init__()
        cut, joined, sizes = weights.cut(entry), entry.rule.layout, [shape[0] for shape, _ in weights.made[entry.kind]]
        self.scale, self.cut, self.group, self.sequence_parallel = scale, cut, cut.group, layer.sequence_parallel
        self.inward, parts = joined is Joined.COLUMNS, 2 if joined is Joined.JOINED else 1
        b = torch.zeros(parts, sizes[number] // parts, len(a))
        a, b = (a.chunk(cut.size, 1)[cut.rank], b) if self.inward else (a, b.chunk(cut.size, 1)[cut.rank])
        self.a, self.b = (torch.nn.Parameter(x.to(layer.weight, copy=True)) for x in (a, b))
        for _, parameter, is_cut in self._named():
            if is_cut:
                set_tensor_model_parallel_attributes(parameter, True, 1, 1)
            else:  # the gradient is the sum over the ranks' tokens
                parameter.sequence_parallel = self.sequence_parallel
        self.columns = None
        if len(sizes) > 1:
            owners = joined.split([torch.full((n,), i) for i, n in enumerate(sizes)], cut.rank, cut.size, weights.shape)
            self.columns = (owners == number).nonzero().flatten().to(layer.weight.device)

    def _named(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield PEFT's name, the parameter, and whether tensor parallelism shards it, which is along axis 1."""
        yield "lora_A.weight", self.a, self.inward
        yield "lora_B.weight", self.b, not self.inward

    def add(self, x: Tensor, out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Return the result `out` of megatron's layer for input `x`, with `scale * B A x` added."""
        low = self._between(F.linear(x, self.a))
        found = self.scale * F.linear(low, self.b.flatten(0, 1))
        return (out[0] + found if self.columns is None else out[0].index_add(-1, self.columns, found)), out[1]

    def _between(self, low: Tensor) -> Tensor:
        """Return the outputs of A for all inputs, for the tokens of the layer's outputs."""
        if self.inward and self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(low, self.group)
        if self.inward:
            return mappings.reduce_from_tensor_model_parallel_region(low, self.group)
        if self.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(low, group=self.group)
        return mappings.copy_to_tensor_model_parallel_region(low, self.group)

    def sharded(self, layer: str) -> dict[str, Any]:
        """Return the parameters in the form of megatron's checkpoints, under names that begin with `layer`."""
        kinds = (make_sharded_tensor_for_checkpoint, partial(make_tp_sharded_tensor_for_checkpoint, tp_axis=1))
        return {f"{layer}.{name}": kinds[is_cut](p, f"{layer}.{name}") for name, p, is_cut in self._named()}

    @torch.no_grad()
    def take(self, layer: str, state: Mapping[str, Tensor]) -> None:
        """Set the parameters from loaded values of `sharded`."""
        for name, parameter, _ in self._named():
            parameter.copy_(state[f"{layer}.{name}"])

    @torch.no_grad()
    def whole(self, layer: str) -> dict[str, Tensor]:
        """Return A [rank, in] and B [out, rank] by PEFT's names, on the CPU. Collective over tensor parallelism."""
        found = {}
        for name, parameter, is_cut in self._named():
            parts = self.cut.gathered(parameter.detach()) if is_cut else [parameter.detach()]
            found[f"{layer}.{name}"] = torch.cat(parts, 1).flatten(0, -2).cpu()
        return found
