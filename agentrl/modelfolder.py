"""Checks of a Hugging Face model folder before a model is built. A damaged or contradictory file raises
`CheckpointError` with file and field. Of the weights, only the headers are read."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from agentrl.errors import CheckpointError, raised_as

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER = "adapter_config.json"  # the file that marks a folder of PEFT: an adapter in place of weights
_SIZES = re.compile(
    "(vocab|hidden|intermediate)_size|num_(hidden_layer|(attention|key_value)_head)s|head_dim|max_position_embeddings"
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # the keys of config.json for the number of experts
STATEFUL = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe"}
"""Model types whose layers may have a state (gated delta nets, short convolutions). `is_stateful` finds such layers."""
VISION_MODEL_TYPES = {"qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe"}  # model types with image input
VISION = ("model.visual.", "visual.")  # prefixes of the names of vision weights, in transformers and in folders
_STATE = re.compile(r".*\blayers\.\d+\.(linear_attn|conv)")
_PACKED = 8  # maximum number of weights that are stored as one number
Stored = dict[str, tuple[str, list[int]]]  # file and shape of each tensor, by its name


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`."""
    what, remedy = f"{file}: not valid JSON", "fetch it again"
    with raised_as(CheckpointError, what, ValueError, RecursionError, shown=" ({})", remedy=remedy):
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=_constant)
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds a {type(found).__name__}, expected a JSON object")
    return found


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("a number is NaN")
    return float(name)


def read_config(folder: Path) -> dict[str, Any]:
    """Read the folder's `config.json`, and check that its sizes are positive integers."""
    file = folder / "config.json"
    if not file.is_file():
        said = f"{folder}: expected a Hugging Face model folder with config.json, found none"
        hint = "a torch_dist folder of Megatron's goes to --load, beside the Hugging Face folder that it was made from"
        raise CheckpointError(f"{said} ({hint})")
    config = read_json(file)
    for name, value in text_config(config).items():
        if name == "model_type" and not isinstance(value, str):
            raise CheckpointError(f"{file}: {name}: expected text, got {value!r:.80}")
        size = isinstance(value, list | None) or (type(value) is int and 0 < value < 2**63)
        if _SIZES.fullmatch(name) and not size:
            raise CheckpointError(f"{file}: {name}: expected a whole number, at least 1, got {value!r:.80}")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's settings. The `text_config` of a composite model is merged into the top level."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The placeholder ids of a model's images."""

    id: int
    patches: int  # patches of an image's grid per placeholder

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Read a folder's `config.json`; None if the model has no image input."""
        config = read_config(folder)
        if config.get("model_type") not in VISION_MODEL_TYPES:
            return None
        vision = config.get("vision_config")
        merge = vision.get("spatial_merge_size", 2) if isinstance(vision, dict) else None
        token = config.get("image_token_id")
        if type(token) is not int or type(merge) is not int:
            what = f"{folder / 'config.json'}: image_token_id and vision_config.spatial_merge_size"
            raise CheckpointError(f"{what}: expected whole numbers, got {token!r} and {merge!r}")
        return cls(token, merge**2)

    def runs(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return the bounds of each run of placeholders in `ids`."""
        import numpy as np

        edges = np.flatnonzero(np.diff(np.asarray(ids) == self.id, prepend=False, append=False)).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))


def is_stateful(module: str) -> bool:
    """Return true if the transformers module with this name carries a state from earlier to later tokens."""
    return bool(_STATE.fullmatch(module))


def is_float8(config: dict[str, Any]) -> bool:
    """Return true if weights are float8 with one scale per block of 128 x 128, as DeepSeek publishes them."""
    said = config.get("quantization_config")
    return isinstance(said, dict) and (said.get("quant_method"), said.get("weight_block_size")) == ("fp8", [128, 128])


def stored_tensors(folder: Path) -> Stored:
    """Return file and shape of each tensor of one safetensors file, or of shards with an index."""
    from safetensors import SafetensorError, safe_open

    weight_map: dict[str, Any] = {}
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map") or {}
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX}: weight_map: expected a file's name for each tensor")
    elif not (folder / SINGLE).is_file():
        raise CheckpointError(f"{folder}: expected {SINGLE} or {INDEX}; only safetensors weights can be read")
    names = sorted(set(weight_map.values())) or [SINGLE]
    if missing := [name for name in names if not (folder / name).is_file()]:
        said = f"{folder}: {INDEX} names {missing[0]} and {len(missing) - 1} more files that do not exist"
        raise CheckpointError(f"{said}; fetch them")
    found: Stored = {}
    for name in names:
        what = f"{folder / name}: not a readable safetensors file"
        damaged = raised_as(CheckpointError, what, OSError, SafetensorError, shown=" ({})", remedy="fetch it again")
        with damaged, safe_open(folder / name, framework="np") as opened:
            found |= {key: (name, opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    if lost := sorted(weight_map.keys() - found.keys()):
        raise CheckpointError(f"{folder}: {INDEX} names {lost[0]} and {len(lost) - 1} more tensors that are in no file")
    return found


def check_weights(folder: Path) -> None:
    """Check that the weights are complete, and large enough for the sizes in `config.json`."""
    config, found = text_config(read_config(folder)), stored_tensors(folder)
    layers, width = config.get("num_hidden_layers"), config.get("hidden_size")
    asked = {"num_hidden_layers": (layers, len(found), "tensors")}
    if isinstance(width, int) and isinstance(config.get("vocab_size"), int):
        largest = max((math.prod(shape) for _, shape in found.values()), default=0) * _PACKED
        asked["vocab_size"] = (config["vocab_size"], largest // width, f"rows of {width} numbers")
    for name, (value, most, what) in asked.items():
        if isinstance(value, int) and value > most:
            said = f"{name} is {value}, and the weights have no more than {most} {what}; fetch both again"
            raise CheckpointError(f"{folder / 'config.json'}: {said}")
