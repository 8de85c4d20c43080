"""Hugging Face model folders, which are written atomically. Tensors are read one at a time, on demand. Tensors in
float8 blocks, the format of DeepSeek's models, are dequantized."""

import functools
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from agentrl.errors import CheckpointError
from agentrl.modelfolder import INDEX, SINGLE, VISION, is_float8, read_config, stored_tensors
from agentrl.train.checkpoints import TRACKER, whole_folder

SCALE = "_scale_inv"  # suffix of the name of a float8 weight's scales
_WEIGHTS: tuple[str, ...] = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", INDEX)
_WEIGHTS += (".distcp", "metadata.json", TRACKER)
"""Suffixes of the names of weight files, and of files about weights. The last three are Megatron's."""


class HFFolder:
    """A model folder on disk. `config` is `config.json` without a float8 quantization, because `tensor` dequantizes.
    Raises CheckpointError: the folder lacks a file, or `config.json` is invalid."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = read_config(self.path)
        self.quantization = self.config.pop("quantization_config") if is_float8(self.config) else None
        self._made = self.quantization is not None

    @functools.cached_property
    def _stored(self) -> Mapping[str, str]:
        return {name: file for name, (file, _) in stored_tensors(self.path).items()}

    @functools.cached_property
    def files(self) -> Mapping[str, str]:
        """The weight file that holds each tensor, by tensor name."""
        return {name: file for name, file in self._stored.items() if not (self._made and name.endswith(SCALE))}

    @functools.cached_property
    def scaled(self) -> frozenset[str]:
        """The names of the tensors that are stored in float8 blocks."""
        stored = self._stored if self.quantization is not None else {}
        return frozenset(name for name in stored if name + SCALE in stored)

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor to the CPU in its stored dtype. Float8 blocks are dequantized to the dtype of the config."""
        if name not in self.files:
            raise CheckpointError(f"{self.path}: no tensor {name!r} among its {len(self.files)} tensors")
        found = self._read(name)
        return found if found.element_size() > 1 or not self._made else self._multiplied(name, found)

    def given(self) -> dict[str, Any]:
        """Return arguments for transformers' `from_pretrained`: the folder, or a state dict from `tensor`."""
        if not self._made:
            return {"pretrained_model_name_or_path": self.path}
        weights = {name: self.tensor(name) for name in self.files}
        return {"pretrained_model_name_or_path": None, "state_dict": weights}

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self.path / self._stored[name], framework="pt") as weights:
            found: torch.Tensor = weights.get_tensor(name)
            return found

    def _multiplied(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Multiply each block of 128 x 128 by its scale in float32, and round to the dtype of `config.json`."""
        scales = self._read(name + SCALE) if name + SCALE in self._stored else torch.empty(0)
        if not scales.is_floating_point() or list(scales.shape) != [-(-size // 128) for size in weight.shape]:
            raise CheckpointError(
                f"{self.path}: {name} is of {weight.dtype} and {list(weight.shape)}, and its "
                f"{name + SCALE} of {scales.dtype} and {list(scales.shape)}"
            )
        spread = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        kind = self.config.get("dtype") or self.config.get("torch_dtype")
        whole = weight.float().mul_(spread[: weight.size(0), : weight.size(1)])
        return whole.to(getattr(torch, str(kind), torch.bfloat16))


def write(
    path: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    source: HFFolder,
    max_shard_bytes: int = 4 << 30,
    quantized: bool = False,
) -> None:
    """Write a model folder atomically; an old folder of this name is replaced. Config, tokenizer files, and vision
    weights that `tensors` lack are copied from `source`. Each tensor is moved to the CPU as it arrives. A weight file
    has at most `max_shard_bytes`, or one tensor. `quantized`: the tensors are in float8 blocks, as in `source`."""
    with whole_folder(Path(path)) as partial:
        copy_rest(source.path, partial)
        stored = _write_weights(partial, _with_vision(tensors, source), max_shard_bytes)
        config = dict(source.config)
        for key in ("dtype", "torch_dtype"):
            if key in config and stored and not quantized:
                config[key] = stored
        if quantized:
            config["quantization_config"] = source.quantization
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _with_vision(tensors: Iterable[tuple[str, torch.Tensor]], source: HFFolder) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, and then the vision weights of `source` that are not among them."""
    given = set()
    for name, tensor in tensors:
        given.add(name)
        yield name, tensor
    for name in source.files if "vision_config" in source.config else ():
        if name.startswith(VISION) and name not in given:
            yield name, source.tensor(name)


def copy_rest(source: Path, target: Path) -> None:
    """Copy the files of a model folder, except weights and hidden files."""
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS) and not file.name.startswith("."):
            shutil.copy2(file, target / file.name)


def _write_weights(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> str:
    """Write the shards, and an index if there are several. Returns the name of the floating dtype with most bytes."""
    shards: list[list[str]] = []
    kinds: Counter[torch.dtype] = Counter()
    for held in _shards(tensors, max_bytes):
        save_file(held, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(held))
        for tensor in held.values():
            kinds[tensor.dtype] += tensor.nbytes
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE
        (folder / f"shard-{i}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": kinds.total()}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    floating = (str(kind).removeprefix("torch.") for kind, _ in kinds.most_common() if kind.is_floating_point)
    return next(floating, "")


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield CPU copies of the tensors in dicts of at most `max_bytes`. A dict is cleared before the next is filled."""
    held: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if held and sum(kept.nbytes for kept in held.values()) + tensor.nbytes > max_bytes:
            yield held
            held.clear()
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
    yield held
