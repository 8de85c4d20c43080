"""Damaged and hostile model folders: each is one error that names the file and what is wrong with it."""

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.cli.main import run
from agentrl.engine.embedded.model import load_model
from agentrl.errors import AgentRLError, CheckpointError
from agentrl.modelfolder import INDEX, SINGLE, check_weights, read_config, stored_tensors
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("whole") / "model", "qwen3")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def configured(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def written(name: str, content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return write


def cut(length: int) -> Callable[[Path], None]:
    """An interrupted download."""
    return lambda folder: written(SINGLE, (folder / SINGLE).read_bytes()[:length])(folder)


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        held = load_file(folder / SINGLE)
        change(held)
        save_file(held, folder / SINGLE, metadata={"format": "pt"})

    return rewrite


def only_a_bin(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


def shards(content: dict[str, Any]) -> Callable[[Path], None]:
    return written(INDEX, json.dumps(content).encode())


HEADER = struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(60)
FOUND = [
    (written("config.json", b"["), "config.json: not valid JSON"),
    (written("config.json", b"\xff"), "config.json: not valid JSON"),
    (written("config.json", b"[]"), "config.json holds a list"),
    (written("config.json", b'{"a":' * 100_000), "config.json: not valid JSON"),
    (configured(vocab_size=float("nan")), "config.json: not valid JSON .a number is NaN"),
    (configured(vocab_size=10**12), "config.json: vocab_size is 1000000000000, and the weights"),
    (configured(num_hidden_layers=10**8), "config.json: num_hidden_layers is 100000000, and the weights"),
    (configured(hidden_size=-1), "config.json: hidden_size: expected a whole number, at least 1, got -1"),
    (configured(hidden_size=True), "hidden_size: expected"),
    (configured(num_attention_heads=0), "num_attention_heads: expected"),
    (configured(num_key_value_heads="2"), "num_key_value_heads: expected"),
    (configured(max_position_embeddings=1e400), "max_position_embeddings: expected"),
    (configured(model_type=["qwen3"]), "config.json: model_type: expected text"),
    (cut(0), "model.safetensors: not a readable safetensors file"),
    (cut(1000), "model.safetensors: not a readable safetensors file"),
    (cut(-1), "model.safetensors: not a readable safetensors file"),
    (written(SINGLE, HEADER), "model.safetensors: not a readable safetensors file"),
    (written(SINGLE, struct.pack("<Q", 2**63) + b"{}"), "model.safetensors: not a readable safetensors file"),
    (only_a_bin, "only safetensors weights can be read"),
    (shards({"weight_map": ["a"]}), "weight_map: expected"),
    (shards({"weight_map": {"a": 1}}), "weight_map: expected"),
    (shards({"weight_map": {"a": "no.safetensors"}}), "names no.safetensors and 0 more files that do not exist"),
    (shards({"weight_map": {"a": SINGLE}}), "names a and 0 more tensors that are in no file"),
]


@pytest.mark.parametrize(("damage", "message"), FOUND)
def test_damage_is_named_before_anything_is_built(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    check_weights(folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        check_weights(folder)


def without_a_tensor(held: dict[str, torch.Tensor]) -> None:
    del held["model.layers.0.mlp.up_proj.weight"]


def with_a_wrong_shape(held: dict[str, torch.Tensor]) -> None:
    held["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 5)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (only_a_bin, "no weights could be loaded from here: UnpicklingError"),
        (tensors(without_a_tensor), "lack model.layers.0.mlp.up_proj.weight"),
        (tensors(with_a_wrong_shape), "no weights could be loaded from here"),
        (configured(head_dim=10**9), "no weights could be loaded from here"),
        (configured(hidden_act="no_such"), "no weights could be loaded from here"),
        (configured(rope_parameters=7), "config.json cannot be used"),
        (configured(auto_map={"AutoConfig": "x.Y"}, model_type="own"), "config.json cannot be used"),
    ],
)
def test_the_engine_loads_no_part_of_a_model(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(AgentRLError, match=message) as raised:
        load_model(str(folder), dtype="float32", device="cpu", trust_remote_code=False)
    assert str(folder) in str(raised.value)


def test_a_pickle_is_not_run(folder: Path) -> None:
    (folder / SINGLE).unlink()
    torch.save({"a": Hostile(folder / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(AgentRLError, match="no weights could be loaded from here"):
        load_model(str(folder), dtype="float32", device="cpu", trust_remote_code=False)
    assert not (folder / "ran").exists()


class Hostile:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.canary,))


PROMPTS = str(Path(__file__).parents[1] / "examples/retool/data/gsm8k_test.jsonl")
SERVE, DRY = (
    ["serve", "--port", "0"],
    ["train", "--dry-run", "--prompt-data", PROMPTS, "--input-key", "question", "--hf-checkpoint"],
)


@pytest.mark.parametrize(
    ("command", "damage"),
    [
        (SERVE, cut(1000)),
        (SERVE, configured(hidden_size=-1)),
        (SERVE, written("tokenizer.json", b"{")),
        (DRY, cut(1000)),
        (DRY, configured(hidden_size=-1)),
        (DRY, configured(num_hidden_layers=10**8)),
    ],
)
def test_commands_say_it_in_one_sentence(
    folder: Path, command: list[str], damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    assert run([*command, str(folder)]) == 2
    said = capsys.readouterr().err
    assert re.search(f"error: (--hf-checkpoint: )?{folder}", said)


def test_what_is_whole_is_read(whole: Path) -> None:
    assert read_config(whole)["model_type"] == "qwen3"
    found = stored_tensors(whole)
    assert found["model.embed_tokens.weight"] == (SINGLE, [512, read_config(whole)["hidden_size"]])
