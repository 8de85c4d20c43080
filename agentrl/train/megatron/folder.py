"""Torch_dist checkpoints that are read as Hugging Face folders, and folders that are written as torch_dist. A
checkpoint stores the megatron tensor of a rule, without parallelism, under the tensor's name. Layers and experts may be
stacked under the name without their numbers. Transformer Engine fuses a norm into the next linear layer and stores it
under that layer's name. Reading tries all these names. Writing uses Transformer Engine's."""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from agentrl.errors import CheckpointError, raised_as
from agentrl.train.checkpoints import latest, read_manifest, torch_dist
from agentrl.train.hf import HFFolder
from agentrl.train.megatron.families import family_of, shape_of
from agentrl.train.megatron.weights import WeightEntry, unrolled
from agentrl.train.torch_dist import TensorPiece, TorchDist

_FUSED = {
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
}
"""The norms of a layer, and the linear layers into which Transformer Engine fuses them."""


def opened(source: Path, beside: str | Path | None) -> HFFolder:
    """Open the model at `source`: a Hugging Face folder, a torch_dist checkpoint, a run's checkpoint, or a folder of
    checkpoints. `beside` is the folder with the config and tokenizer if `source` has none."""
    if newest := latest(source):
        manifest = read_manifest(newest.path)
        kind = manifest["model"].get("train_backend", "megatron")
        what = "an adapter alone" if "lora_rank" in manifest["optimizer"] else f"train_backend {kind}"
        if what != "train_backend megatron":
            raise CheckpointError(f"{newest.path}: a checkpoint of {what}; --save-hf writes its model beside it")
    stored = newest.path if newest else torch_dist(source)
    if stored is None:
        return HFFolder(source)
    holds = next((folder for folder in (source, stored) if (folder / "config.json").is_file()), beside)
    if holds is None:
        raise CheckpointError(f"{source}: no config.json in it; give the model's Hugging Face folder: --hf-checkpoint")
    return MegatronFolder(stored, holds)


class MegatronFolder(HFFolder):
    """The checkpoint at `stored`, with the config and tokenizer in `path`. Tensors are merged on demand. Raises
    CheckpointError: a tensor of the family's table is missing."""

    def __init__(self, stored: Path, path: str | Path) -> None:
        super().__init__(path)
        self._made = True
        self._checkpoint, self._shape = TorchDist(stored), shape_of(self.config)
        found = [(entry, *self._find(entry)) for entry in unrolled(family_of(self.config), self._shape)]
        self._found = {name: place for place in found for name in place[0].names}
        for key, of in _stacks((key, index) for _, key, index in found).items():
            if of != (there := self._checkpoint.shapes[key][: len(of)]):
                raise CheckpointError(f"{stored}: {key} is stacked {there}, and by {path}/config.json it would be {of}")
        there, of = self._checkpoint.shapes[found[0][1]], (self._shape.vocab, self._shape.hidden)
        if there[1:] != of[1:] or there[:1] < of[:1]:  # the vocabulary may be padded
            raise CheckpointError(f"{stored}: embeddings of {there}, and by {path}/config.json they would be {of}")
        self._merged = functools.lru_cache(maxsize=1)(self._merge)

    @functools.cached_property
    def files(self) -> Mapping[str, str]:
        return {name: key for name, (_, key, _) in self._found.items()}

    def tensor(self, name: str) -> Tensor:
        if name not in self._found:
            raise CheckpointError(f"{self._checkpoint.path}: no tensor that would be {name!r}")
        return self._merged(self._found[name][0].names[0])[name]

    def _merge(self, first: str) -> dict[str, Tensor]:
        entry, key, index = self._found[first]
        stored = self._checkpoint.read(key, index)
        what = f"{self._checkpoint.path}: {key} {list(stored.shape)} does not fit {self.path}/config.json"
        remedy = "give the Hugging Face folder of the model that it was made from"
        with raised_as(CheckpointError, what, RuntimeError, shown=" ({})", remedy=remedy):
            return dict(zip(entry.names, entry.rule.layout.merge([stored], self._shape), strict=True))

    def _find(self, entry: WeightEntry) -> tuple[str, tuple[int, ...]]:
        name = entry.called[0]
        places = {key: index for spelt in (name, _fused(name)) for key, index in _places(spelt)}
        for key in self._checkpoint.shapes.keys() & places:
            return key, places[key]
        raise CheckpointError(
            f"{self._checkpoint.path}: no tensor for {', '.join(entry.names)} of a {self.config['model_type']} model, which "
            f"would be called {' or '.join(places)}"
        )


def parts(folder: HFFolder) -> tuple[list[tuple[str, ...]], Iterator[TensorPiece], dict[str, Any]]:
    """Convert a folder to megatron's form. Returns the Hugging Face names of each part, the parts, and `said` of
    `write`. Layers are stacked, but not in models with experts, because Megatron does not stack a list of layers."""
    shape = shape_of(folder.config)
    entries = list(unrolled(family_of(folder.config), shape))
    names = {entry.called[0] for entry in entries}
    mixed = any(".experts." in name for name in names)
    keyed: list[tuple[WeightEntry, str, tuple[int, ...]]] = []
    for entry in entries:
        name = entry.called[0]
        alone = _fused(name).replace(".layer_norm_weight", ".weight") not in names
        key, index = list(_places(name if alone else _fused(name)))[mixed]
        keyed.append((entry, key, index))
    of = _stacks((key, index) for _, key, index in keyed)

    def split() -> Iterator[TensorPiece]:
        for entry, key, index in keyed:
            tensors = [folder.tensor(name) for name in entry.names]
            yield TensorPiece(key, index, of[key], entry.rule.layout.split(tensors, 0, 1, shape))

    said: dict[str, Any] = {"num_layers": shape.layers, "hidden_size": shape.hidden, "num_attention_heads": shape.heads}
    said["num_experts"] = max((count[-1] for key, count in of.items() if ".experts." in key), default=None)
    return [entry.names for entry in entries], split(), said


def _stacks(places: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Return the number of layers and of experts that are stacked under each key."""
    of: dict[str, tuple[int, ...]] = {}
    for key, index in places:
        of[key] = tuple(max(seen, i + 1) for seen, i in zip(of.get(key, index), index, strict=True))
    return of


def _places(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield a parameter's possible keys, and its index in the stack of layers and experts, of experts, of nothing."""
    name = name.replace(".local_experts.", ".experts.")
    for stacked in (r"\.(\d+)(?=\.)", r"(?<=\.experts)\.(\d+)(?=\.)", r"(?!)()"):
        yield re.sub(stacked, "", name), tuple(map(int, re.findall(stacked, name)))


def _fused(name: str) -> str:
    for norm, linear in _FUSED.items():
        if name.endswith(f".{norm}.weight"):
            return name.replace(f"{norm}.weight", f"{linear}.layer_norm_weight")
    return name
