"""Low-rank adapters of linear layers (LoRA, arXiv:2106.09685): y = W x + (alpha / rank) B A x, with W unchanged.

1. An adapter's folder has PEFT's form: `adapter_config.json` and `adapter_model.safetensors`.
2. `attach` computes the adapter of a plain linear layer, both in the trainer and in the built-in engine.
3. B is 0 before the first step, so that a new adapter does not change the model."""

import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.errors import CheckpointError, raised_as
from agentrl.modelfolder import ADAPTER, read_json

_WEIGHTS, _PREFIX, _ALL = "adapter_model.safetensors", "base_model.model.", "all-linear"
_UNKNOWN = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "target_parameters")


@dataclass(frozen=True, slots=True)
class LoraShape:
    """Rank, alpha and target layers of adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # suffixes of layers' names, or `all-linear`: all but the LM head

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def layers(self, model: Any) -> dict[str, torch.nn.Linear]:
        """Return the layers of a transformers model that get an adapter, by name. Raises the errors of `chosen`."""
        head = model.get_output_embeddings()
        found = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}
        return {name: found[name] for name in self.chosen(found)}

    def chosen(self, layers: Collection[str]) -> list[str]:
        """Return the linear layers that get an adapter. Raises CheckpointError: a target matches no layer."""
        if self.targets == (_ALL,):
            return list(layers)
        for target in self.targets:
            if not any(_ends(name, target) for name in layers):
                known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in layers}))
                raise CheckpointError(f"an adapter's target {target!r} is no linear layer of the model; it has {known}")
        return [name for name in layers if any(_ends(name, target) for target in self.targets)]


def _ends(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def start(layer: str, rank: int, inputs: int, seed: int) -> Tensor:
    """Return a layer's A [rank, inputs] before the first step, float32, initialized like the weight of torch's linear
    layer. A depends only on the layer's name and the seed, so it is the same in all backends and layouts."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {layer}".encode()))
    return torch.empty(rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)


Map = Callable[[Tensor], Tensor]


def attach(layer: torch.nn.Linear, a: Map, b: Map, scale: float, on: Callable[[], bool]) -> Any:
    """Add `scale * b(a(x))` to the layer's output while `on()` is true; returns a handle that can `remove` it."""

    def add(_: Any, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out + scale * b(a(inputs[0])) if on() else out

    return layer.register_forward_hook(add)


@contextmanager
def off(model: Any) -> Iterator[None]:
    """Turn off the adapters of a trained model in this context: they read the model's `adapters_on`."""
    model.adapters_on = False
    try:
        yield
    finally:
        model.adapters_on = True


def merged(name: str, weight: Tensor, adapter: Mapping[str, Tensor], scale: float) -> Tensor:
    """Return a layer's weight with its adapter added in float32, in the weight's dtype; other weights unchanged."""
    layer = name.removesuffix(".weight")
    if f"{layer}.lora_A.weight" not in adapter:
        return weight
    a, b = (adapter[f"{layer}.lora_{x}.weight"].to(weight.device, torch.float32) for x in "AB")
    return (weight.float() + scale * (b @ a)).to(weight.dtype)


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], shape: LoraShape, base: Path) -> None:
    """Write an adapter for the model in the folder `base` to an empty folder, in PEFT's form. `tensors`:
    `<layer>.lora_A.weight` [rank, in] and `<layer>.lora_B.weight` [out, rank]."""
    save_file({_PREFIX + name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / _WEIGHTS)
    config: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base)}
    config |= {"r": shape.rank, "lora_alpha": shape.alpha, "lora_dropout": 0.0, "bias": "none"}
    config |= {"target_modules": sorted({name.split(".")[-3] for name in tensors}), "inference_mode": True}
    (folder / ADAPTER).write_text(json.dumps(config, indent=2) + "\n")


def read_adapter(path: Path) -> tuple[LoraShape, dict[str, Tensor]]:
    """Read an adapter of `write_adapter` or PEFT. Raises CheckpointError: it is damaged or is not plain LoRA."""
    if not (path / ADAPTER).is_file():
        raise CheckpointError(f"{path}: expected a folder of PEFT's with {ADAPTER}, found none")
    config = {"r": None, "lora_alpha": None, "target_modules": (), **read_json(path / ADAPTER)}
    other = [key for key in _UNKNOWN if config.get(key)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or other:
        what = ", ".join(other) or f"peft_type {config.get('peft_type')!r}, bias {config.get('bias')!r}"
        raise CheckpointError(f"{path / ADAPTER}: expected plain LoRA without biases, got {what}")
    with raised_as(CheckpointError, str(path / _WEIGHTS), OSError, SafetensorError):
        tensors = load_file(path / _WEIGHTS)
    rank, alpha, targets = (config[key] for key in ("r", "lora_alpha", "target_modules"))
    if not (type(rank) is int and rank > 0 and isinstance(alpha, int | float) and targets):
        raise CheckpointError(f"{path / ADAPTER}: expected numbers r and lora_alpha, and target_modules")
    whole = {f"{name.rsplit('.lora_', 1)[0]}.lora_{side}.weight" for name in tensors for side in "AB"}
    if odd := sorted(whole ^ tensors.keys()):
        raise CheckpointError(f"{path / _WEIGHTS}: expected pairs lora_A.weight and lora_B.weight, see {odd[0]}")
    shape = LoraShape(rank, alpha, (targets,) if isinstance(targets, str) else tuple(targets))
    return shape, {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def pairs(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (layer, A, B) of an adapter's tensors."""
    for layer in dict.fromkeys(name.rsplit(".lora_", 1)[0] for name in tensors):
        yield layer, tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"]
