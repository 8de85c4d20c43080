"""Models with the `config.json` of published ones: `shapes/config_shapes.jsonl`, each with its source."""

import functools
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.tiny_models import make_tokenizer
from tests.support.vision import IMAGE_PAD, tokenizer_with_images

_PROCESSOR: dict[str, Any] = {
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
_PROCESSOR |= {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16}
_FILE = Path(__file__).parent / "shapes" / "config_shapes.jsonl"


@functools.cache
def real_shapes() -> Mapping[str, Mapping[str, Any]]:
    """Return `config.json` by the model's name, without lists of unquantised layers; vision parts only for Qwen3.5."""
    rows = map(json.loads, _FILE.read_text(encoding="utf-8").splitlines())
    return {row["name"]: row["config"] for row in rows}


def real_folder(folder: Path, name: str, *, float8: bool = True) -> Path:
    """Make a folder with that `config.json`, a tiny tokenizer, sparse weights and, for a vision model, the processor's
    settings. Without `float8` it is what `agentrl convert` makes of float8 weights."""
    config = dict(real_shapes()[name])
    if not float8 and (config.get("quantization_config") or {}).get("quant_method") == "fp8":
        del config["quantization_config"]
    (tokenizer_with_images if "vision_config" in config else make_tokenizer)().save_pretrained(folder)
    if "vision_config" in config:
        config["image_token_id"] = IMAGE_PAD  # the tiny tokenizer's
        (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    (folder / "config.json").write_text(json.dumps(config))
    text = config.get("text_config", config)
    rows, width = text["vocab_size"] // 8 + 1, text["hidden_size"]
    header: dict[str, Any] = {"embed": {"dtype": "U8", "shape": [rows, width], "data_offsets": [0, rows * width]}}
    for at in range(rows * width, rows * width + text["num_hidden_layers"]):
        header[f"layer.{at}"] = {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]}
    written = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(written)) + written)
        file.truncate(8 + len(written) + rows * width + len(header) - 1)
    return folder
