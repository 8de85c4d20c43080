"""Models with the `config.json` of published ones: `shapes/config_shapes.jsonl`, each with where it is from."""

import functools
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.tiny_models import make_tokenizer

_FILE = Path(__file__).parent / "shapes" / "config_shapes.jsonl"


@functools.cache
def real_shapes() -> Mapping[str, Mapping[str, Any]]:
    """`config.json` by the model's name, without parts for images and without lists of layers that are not quantised."""
    rows = map(json.loads, _FILE.read_text(encoding="utf-8").splitlines())
    return {row["name"]: row["config"] for row in rows}


def real_folder(folder: Path, name: str, *, float8: bool = True) -> Path:
    """A folder with that `config.json`, a tiny tokenizer, and a hole for weights. Without `float8` it is what `agentrl convert`
    makes of float8 weights."""
    config = dict(real_shapes()[name])
    if not float8 and (config.get("quantization_config") or {}).get("quant_method") == "fp8":
        del config["quantization_config"]
    make_tokenizer().save_pretrained(folder)
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
