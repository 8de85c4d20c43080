"""Weights between Hugging Face folders and the megatron model, following the family's table.

1. `load` streams: one rule's tensors are read, cut for this rank, copied; every parameter must be filled.
2. `export` is collective and yields full tensors under HF names on global rank 0 only, stage by stage: each stage's
   first data-parallel replica gathers over its tensor-parallel ranks and sends to rank 0. Other ranks iterate an
   empty stream, and must exhaust it.
3. Nothing is converted: dtypes stay as they are, so a round trip is exact to the bit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.errors import CheckpointError, TrainError
from agentrl.train.contracts import WeightSpec
from agentrl.train.hf import HFFolder
from agentrl.train.megatron.families import Family, ModelShape, Rule
from agentrl.train.megatron.families import Layout as RuleLayout
from agentrl.train.megatron.layout import Layout
from agentrl.train.megatron.model import unwrap
from agentrl.train.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class _Entry:
    """One rule for one layer (or none) with its names filled in, and the stage that has it."""

    stage: int
    parameter: str
    names: tuple[str, ...]
    rule: Rule
    layer: int = 0

    @property
    def called(self) -> tuple[str, ...]:
        """Megatron's name, with the layer's number in the whole model, and Hugging Face's names."""
        return (self.rule.megatron.format(self.layer), *self.names)


_VALUE_HEAD = Rule("output_layer.weight", ("score.weight",), RuleLayout.WHOLE)
"""Named as transformers' classifiers name it: a reward model of one score is a critic to start from."""


class WeightMap:
    """The family's table unrolled for one model and layout; with `values` for one that ends in a value head."""

    def __init__(self, family: Family, shape: ModelShape, layout: Layout, *, values: bool = False) -> None:
        self.shape, self.layout, self.family, self.values = shape, layout, family, values
        self.entries = list(self._unroll())

    def _unroll(self) -> Iterator[_Entry]:
        last, per_stage = self.layout.pp - 1, self.shape.layers // self.layout.pp
        yield self._entry(0, self.family.embedding)
        for layer in range(self.shape.layers):
            for rule in self.family.layer_rules:
                names = tuple(name.format(layer) for name in rule.hf)
                yield _Entry(layer // per_stage, rule.megatron.format(layer % per_stage), names, rule, layer)
        yield self._entry(last, self.family.final_norm)
        if self.values:
            yield self._entry(last, _VALUE_HEAD)
        elif not self.shape.tied:
            yield self._entry(last, self.family.head(tied=False))

    def _entry(self, stage: int, rule: Rule) -> _Entry:
        return _Entry(stage, rule.megatron, rule.hf, rule)

    def load(self, model: torch.nn.Module, folder: HFFolder) -> None:
        """Fill this rank's parameters from a folder; a value head that it has not starts as 0.

        Raises:
            CheckpointError: a tensor is missing or has another shape than the config implies.
        """
        parameters = dict(unwrap(model).named_parameters())
        entries = [e for e in self.entries if e.stage == self.layout.pp_rank]
        if self.shape.tied and "output_layer.weight" in parameters:
            entries.append(self._entry(self.layout.pp_rank, self.family.head(tied=True)))
        missing = set(parameters) - {e.parameter for e in entries}
        if missing:
            raise CheckpointError(f"the {self.family.model_type} table has no rule for {sorted(missing)}")
        for entry in entries:
            self._fill(parameters[entry.parameter], entry, folder)

    @torch.no_grad()
    def _fill(self, parameter: Tensor, entry: _Entry, folder: HFFolder) -> None:
        if entry.rule is _VALUE_HEAD and entry.names[0] not in folder.files:
            parameter.zero_()
            return
        tensors = [folder.tensor(name) for name in entry.names]
        try:
            local = entry.rule.layout.split(tensors, self.layout.tp_rank, self.layout.tp, self.shape)
        except RuntimeError as error:
            raise CheckpointError(f"{folder.path}: {entry.names} do not fit config.json ({error})") from error
        if local.shape != parameter.shape:
            raise CheckpointError(
                f"{folder.path}: {', '.join(entry.names)}: expected a local shape {tuple(parameter.shape)} "
                f"from config.json, got {tuple(local.shape)}"
            )
        parameter.copy_(local)

    def learning(self, settings: TrainSettings) -> set[str]:
        """This rank's parameters that learn, by megatron's names: all but what the settings freeze.

        A pattern is searched for in each parameter's names (`_Entry.called`). A head that is tied to the embedding learns
        where that does.

        Raises:
            TrainError: a pattern that no name has, or a pipeline stage that would learn nothing; alike on every rank.
        """
        only = settings.only_train_params_name_list
        patterns = only or settings.freeze_params_name_list
        flag = f"--{'only-train' if only else 'freeze'}-params-name-list"
        for pattern in patterns:
            if not any(_has(entry, [pattern]) for entry in self.entries):
                some = ", ".join(name for entry in self.entries[1:3] for name in entry.called)
                raise TrainError(f"{flag} {pattern}: no parameter is called so; they are called like {some}")
        learn = [e for e in self.entries if _has(e, patterns) == bool(only)]
        if idle := sorted(set(range(self.layout.pp)) - {entry.stage for entry in learn}):
            where = f"pipeline stage {idle[0]}" if self.layout.pp > 1 else "the model"
            raise TrainError(f"{flag} {' '.join(patterns)}: nothing of {where} is left to learn; freeze less of it")
        tied = {"output_layer.weight"} if self.shape.tied and self.entries[0] in learn else set()
        return {entry.parameter for entry in learn if entry.stage == self.layout.pp_rank} | tied

    def names(self) -> list[str]:
        """HF names in export order."""
        return [name for entry in self.entries for name in entry.names]

    def specs(self, dtype: torch.dtype) -> list[WeightSpec]:
        """What `export` yields with `dtype`, in its order, without touching a tensor."""
        kind = str(dtype).removeprefix("torch.")
        shapes = _shapes(self.shape)
        return [WeightSpec(name, kind, list(shapes[_kind(name)])) for name in self.names()]

    @torch.no_grad()
    def export(
        self, parameters: Mapping[str, Tensor], dtype: torch.dtype, only: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, full tensor) on rank 0; see the module's point 2.

        Args:
            parameters: this rank's tensors by megatron name (the weights, or anything of their shapes).
            dtype: of the tensors.
            only: HF names to export; the same on every rank.
        """
        specs = {spec.name: spec for spec in self.specs(dtype)}
        wanted = set(specs) if only is None else set(only)
        me, first_replica = self.layout, self.layout.dp_rank == 0 and self.layout.cp_rank == 0
        for entry in self.entries:
            if wanted.isdisjoint(entry.names):
                continue
            tensors: list[Tensor] = []
            if first_replica and entry.stage == me.pp_rank:
                tensors = self._gather(parameters[entry.parameter].detach(), entry.rule)
            if entry.stage != 0 and first_replica and me.tp_rank == 0:
                tensors = self._to_rank_zero(tensors, entry, [specs[name] for name in entry.names], dtype)
            if me.rank == 0:
                yield from (pair for pair in zip(entry.names, tensors, strict=True) if pair[0] in wanted)

    def _gather(self, local: Tensor, rule: Rule) -> list[Tensor]:
        parts = [local]
        if self.layout.tp > 1:
            parts = [torch.empty_like(local) for _ in range(self.layout.tp)]
            dist.all_gather(parts, local.contiguous(), group=self.layout.tp_group)
        return rule.layout.merge(parts, self.shape)

    def _to_rank_zero(
        self, tensors: list[Tensor], entry: _Entry, specs: list[WeightSpec], dtype: torch.dtype
    ) -> list[Tensor]:
        if entry.stage == self.layout.pp_rank:
            for tensor in tensors:
                dist.send(tensor.contiguous(), dst=0)
        elif self.layout.rank == 0:
            device = "cpu" if dist.get_backend() == "gloo" else torch.cuda.current_device()
            tensors = [torch.empty(spec.shape, dtype=dtype, device=device) for spec in specs]
            for tensor in tensors:
                dist.recv(tensor, src=self.layout.pp_ranks[entry.stage])
        return tensors


def _has(entry: _Entry, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns for name in entry.called)


def _kind(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `q_proj`, and with `.bias` at its end `q_proj.bias`."""
    *_, module, kind = name.split(".")
    return module if kind == "weight" else f"{module}.{kind}"


def _shapes(s: ModelShape) -> dict[str, tuple[int, ...]]:
    """Full shape of each kind of HF tensor."""
    q, kv = s.heads * s.head_dim, s.groups * s.head_dim
    latent = {}
    if z := s.latent:
        latent = {
            "kv_a_proj_with_mqa": (z.rank + z.rotated, s.hidden),
            "kv_a_layernorm": (z.rank,),
            "kv_b_proj": (s.heads * (s.head_dim - z.rotated + z.value), z.rank),
            "q_a_proj": (z.query_rank or 0, s.hidden),
            "q_a_layernorm": (z.query_rank or 0,),
            "q_b_proj": (q, z.query_rank or 0),
        }
    return {
        **latent,
        "input_layernorm": (s.hidden,),
        "post_attention_layernorm": (s.hidden,),
        "post_self_attn_layernorm": (s.hidden,),
        "post_mlp_layernorm": (s.hidden,),
        "norm": (s.hidden,),
        "embed_tokens": (s.vocab, s.hidden),
        "lm_head": (s.vocab, s.hidden),
        "score": (1, s.hidden),
        "q_proj": (q, s.hidden),
        "k_proj": (kv, s.hidden),
        "v_proj": (kv, s.hidden),
        "o_proj": (s.hidden, s.heads * s.value_dim),
        "q_proj.bias": (q,),
        "k_proj.bias": (kv,),
        "v_proj.bias": (kv,),
        "gate_proj": (s.ffn, s.hidden),
        "up_proj": (s.ffn, s.hidden),
        "gate_up_proj": (2 * s.ffn, s.hidden),
        "down_proj": (s.hidden, s.ffn),
        "q_norm": (s.head_dim,),
        "k_norm": (s.head_dim,),
    }
