"""Conversion of weights between Hugging Face folders and the megatron model, by the family's table. `load` reads,
shards and copies the tensors of one rule after another; every parameter must be filled. `export` is collective: it
yields full tensors on global rank 0, or each stage's on the stage's first rank. Other ranks must exhaust an empty
iterator. `export` keeps dtypes, so a round trip is exact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor

from agentrl.engine.weights import TensorSpec, buckets
from agentrl.errors import CheckpointError, raised_as
from agentrl.numerics.weight_group import views
from agentrl.train.hf import HFFolder
from agentrl.train.megatron.families import ModelFamily, ModelShape, Rule
from agentrl.train.megatron.families.base import EMBEDDING, FINAL_NORM, HEAD, TIED_HEAD, VALUE_HEAD
from agentrl.train.megatron.layout import Cut, ParallelLayout
from agentrl.train.network import ELSEWHERE, idle, learning
from agentrl.train.settings import TrainSettings

_MOVED = 256 << 20
"""Bytes of weights that go from one rank to another in one message."""


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """One rule for one layer and expert (or none), with its names filled in. Its place in the layout is the pipeline
    stage `stage`, and the index `part` of its expert-parallel ranks."""

    stage: int
    parameter: str
    names: tuple[str, ...]
    rule: Rule
    layer: int = 0
    expert: int = 0
    part: int = 0

    @classmethod
    def single(cls, stage: int, rule: Rule) -> WeightEntry:
        """Return the entry of a rule that belongs to no layer."""
        return cls(stage, rule.megatron, rule.hf, rule)

    @property
    def called(self) -> tuple[str, ...]:
        """Return megatron's name, with the numbers of layer and expert in the whole model, and Hugging Face's names."""
        return (self.rule.megatron.format(self.layer, expert=self.expert), *self.names)

    @property
    def kind(self) -> str:
        """Return the key of the entry's shapes and dtypes; the experts of a layer share it."""
        return self.rule.megatron.format(self.layer, expert="")


def unrolled(
    family: ModelFamily, shape: ModelShape, stages: Sequence[int] = (), ep: int = 1, *, values: bool = False
) -> Iterator[WeightEntry]:
    """Yield the entries of the family's table, over stages of `stages` layers (default: one stage) and `ep` ranks."""
    places = [(stage, place) for stage, size in enumerate(stages or [shape.layers]) for place in range(size)]
    experts = shape.mixture.experts if shape.mixture else 0
    yield WeightEntry.single(0, EMBEDDING)
    for layer, (stage, place) in enumerate(places):
        for rule in family.rules(layer, shape):
            for expert in range(experts if rule.of_expert else 1):
                part, number = divmod(expert, experts // ep or 1)
                names = tuple(name.format(layer, expert=expert) for name in rule.hf)
                parameter = rule.megatron.format(place, expert=number)
                yield WeightEntry(stage, parameter, names, rule, layer, expert, part)
    yield WeightEntry.single(places[-1][0], FINAL_NORM)
    if values or not shape.tied:
        yield WeightEntry.single(places[-1][0], VALUE_HEAD if values else HEAD)


class WeightMap:
    """The entries of the family's table for one `model`; `values`: the model has a value head. Collective."""

    def __init__(
        self,
        family: ModelFamily,
        shape: ModelShape,
        layout: ParallelLayout,
        settings: TrainSettings,
        model: Any,
        *,
        values: bool,
    ) -> None:
        self.shape, self.layout, self.family = shape, layout, family
        stages = settings.stage_sizes(shape.layers)
        self.entries = list(unrolled(family, shape, stages, len(layout.ep_ranks), values=values))
        self.made = self._measured(stored(model))

    def _measured(self, tensors: Mapping[str, Tensor]) -> dict[str, list[tuple[list[int], torch.dtype]]]:
        """Return shapes and dtypes of the HF tensors of each kind of entry, for all stages."""
        made = {}
        for entry in filter(self.is_mine, self.entries):
            parts = [torch.empty_like(tensors[entry.parameter], device="meta")] * self.cut(entry).size
            merged = entry.rule.layout.merge(parts, self.shape)
            made[entry.kind] = [(list(tensor.shape), tensor.dtype) for tensor in merged]
        return self.layout.from_stages(made)

    @property
    def matrices(self) -> int:
        """Return `matrices` of `train.network.CostShape`."""
        mixture, found = self.shape.mixture, 0.0
        for entry in self.entries[not self.shape.tied :]:  # an untied embedding is looked up, not multiplied with
            met = mixture.topk / mixture.experts if mixture and entry.rule.of_expert else 1
            found += met * sum(math.prod(shape) for shape, _ in self.made[entry.kind] if len(shape) > 1)
        return round(found)

    def cut(self, entry: WeightEntry) -> Cut:
        return self.layout.experts if entry.rule.of_expert else self.layout.dense

    def is_mine(self, entry: WeightEntry) -> bool:
        here = entry.part == self.layout.ep_rank or not entry.rule.of_expert
        return here and entry.stage == self.layout.pp_rank

    def load(self, model: torch.nn.Module, folder: HFFolder) -> None:
        """Fill this rank's parameters from a folder; a value head that it lacks starts as 0. Raises CheckpointError:
        a tensor is missing or has another shape than the config implies."""
        parameters = stored(model)
        entries = list(filter(self.is_mine, self.entries))
        if self.shape.tied and "output_layer.weight" in parameters:
            entries.append(WeightEntry.single(self.layout.pp_rank, TIED_HEAD))
        missing = set(parameters) - {e.parameter for e in entries}
        if missing:
            raise CheckpointError(f"the {self.family.model_type} table has no rule for {sorted(missing)}")
        for entry in entries:
            self._fill(parameters[entry.parameter], entry, folder)

    @torch.no_grad()
    def _fill(self, parameter: Tensor, entry: WeightEntry, folder: HFFolder) -> None:
        if entry.rule is VALUE_HEAD and entry.names[0] not in folder.files:
            parameter.zero_()
            return
        tensors = [folder.tensor(name) for name in entry.names]
        what = f"{folder.path}: {entry.names} do not fit config.json"
        with raised_as(CheckpointError, what, RuntimeError, shown=" ({})"):
            cut = self.cut(entry)
            local = entry.rule.layout.split(tensors, cut.rank, cut.size, self.shape)
        if local.shape != parameter.shape:
            raise CheckpointError(
                f"{folder.path}: {', '.join(entry.names)}: expected a local shape {tuple(parameter.shape)} "
                f"from config.json, got {tuple(local.shape)}"
            )
        parameter.copy_(local)

    def learning(self, settings: TrainSettings) -> set[str]:
        """Return megatron's names of this rank's parameters that learn: all not frozen, and a tied head if the
        embedding learns. Raises TrainError: a pattern matches no name, or a pipeline stage learns nothing."""
        chosen = learning(settings, [entry.called for entry in self.entries])
        learn = [entry for entry, learns in zip(self.entries, chosen, strict=True) if learns]
        if left := sorted(set(range(self.layout.pp)) - {e.stage for e in learn if not e.rule.of_expert}):
            where = f"pipeline stage {left[0]}" if self.layout.pp > 1 else "the model"
            raise idle(settings, where + (" but experts" if left[0] in {entry.stage for entry in learn} else ""))
        tied = {"output_layer.weight"} if self.shape.tied and self.entries[0] in learn else set()
        return {entry.parameter for entry in filter(self.is_mine, learn)} | tied

    def specs(self) -> dict[int, list[TensorSpec]]:
        """Return the specs of the model's own tensors by the first rank of their stage, in the order of `export`."""
        found: dict[int, list[TensorSpec]] = {}
        for entry in self.entries:
            found.setdefault(self._owner(entry.stage), []).extend(self._specs(entry))
        return found

    def _specs(self, entry: WeightEntry) -> Iterator[TensorSpec]:
        for name, (shape, dtype) in zip(entry.names, self.made[entry.kind], strict=True):
            yield TensorSpec(name, str(dtype).removeprefix("torch."), shape)

    def _owner(self, stage: int, part: int = 0) -> int:
        """Return the first rank of a pipeline stage that has this part of the experts."""
        return self.layout.world // self.layout.pp * stage + self.layout.ep_ranks[part] - self.layout.ep_ranks[0]

    @torch.no_grad()
    def export(
        self, tensors: Mapping[str, Tensor], *, by_stage: bool = False, in_step: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, full tensor) on rank 0, or each stage's on its first rank; see `Network.export`. `tensors`
        are this rank's, by megatron's names: the weights, or other tensors of the same shapes and dtypes."""
        target = self._owner(self.layout.pp_rank) if by_stage else 0
        entries = [entry for entry in self.entries if not by_stage or entry.stage == self.layout.pp_rank]
        for owner, run in itertools.groupby(entries, lambda entry: self._owner(entry.stage, entry.part)):
            found: Iterator[tuple[str, Tensor]]
            if owner == target:
                found = (
                    named for entry in run for named in itertools.zip_longest(entry.names, self._merged(entry, tensors))
                )
            else:
                found = self._moved(list(run), tensors, owner, target)
            for name, tensor in found:
                if self.layout.rank == target:
                    yield name, tensor
                elif in_step:
                    yield name, ELSEWHERE

    def _merged(self, entry: WeightEntry, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the HF tensors of an entry, on the ranks of the first replica that have it; [] on other ranks."""
        cut = self.cut(entry)
        if not (cut.first and self.is_mine(entry)):
            return []
        return entry.rule.layout.merge(cut.gathered(tensors[entry.parameter].detach()), self.shape)

    def _moved(
        self, run: Sequence[WeightEntry], tensors: Mapping[str, Tensor], owner: int, target: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Send the HF tensors of entries from rank `owner` to rank `target` in buckets; `target` yields them."""
        device = "cpu" if dist.get_backend() == "gloo" else torch.device("cuda", torch.cuda.current_device())
        made = (tensor for entry in run for tensor in self._merged(entry, tensors))
        for specs in buckets([spec for entry in run for spec in self._specs(entry)], _MOVED):
            held = list(itertools.islice(made, len(specs)))  # on ranks with shards of the owner's parameters too
            if self.layout.rank not in (owner, target):
                yield from ((spec.name, ELSEWHERE) for spec in specs)
                continue
            flat = torch.empty(sum(spec.nbytes for spec in specs), dtype=torch.uint8, device=device)
            if self.layout.rank == target:
                dist.recv(flat, src=owner)
            else:
                for (_, view), tensor in zip(views(flat, specs), held, strict=True):
                    view.copy_(tensor)
                dist.send(flat, dst=target)
            yield from views(flat, specs)


def stored(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return this rank's parameters, and buffers that checkpoints contain, by megatron's names."""
    inner = unwrap_model(model)
    kept = inner.state_dict()
    return {**dict(inner.named_parameters()), **{n: b for n, b in inner.named_buffers() if n in kept}}
