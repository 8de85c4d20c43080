"""Weights in float8 blocks, as DeepSeek publishes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from agentrl.cli.main import run
from agentrl.errors import CheckpointError, TrainError
from agentrl.modelfolder import read_config
from agentrl.train.hf import HFFolder
from agentrl.train.megatron.families import family_of
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import backend, settings

QUANTIZED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a tiny model whose `NAME` is stored in float8 blocks: [128 + 128 + 44, 128 + 72] numbers."""
    folder = make_tiny_model(tmp_path / "m", "qwen3")
    torch.manual_seed(0)
    source = HFFolder(folder)
    tensors = {name: source.tensor(name) for name in source.files}
    tensors[NAME] = torch.randn(300, 200).to(torch.float8_e4m3fn)
    tensors[NAME + "_scale_inv"] = torch.rand(3, 2) + 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = source.config | {"quantization_config": QUANTIZED, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_blocks_are_multiplied_as_transformers_does(folder: Path, tmp_path: Path) -> None:
    source = HFFolder(folder)
    stored = load_file(folder / "model.safetensors")
    weight, scales = stored[NAME], stored[NAME + "_scale_inv"]
    read = source.tensor(NAME)
    assert read.dtype == torch.bfloat16
    assert NAME + "_scale_inv" not in source.files
    theirs = Fp8Dequantize(None)  # which takes whole blocks
    want = theirs._dequantize_one(weight[:256, :128], scales[:2, :1], torch.bfloat16)
    assert torch.equal(read[:256, :128], want)
    assert torch.equal(read[299, 199], (weight[299, 199].float() * scales[2, 1]).bfloat16())
    assert run(["convert", str(folder), str(tmp_path / "out"), "--to", "hf"]) == 0
    out = HFFolder(tmp_path / "out")
    assert torch.equal(out.tensor(NAME), read)
    assert "quantization_config" not in read_config(tmp_path / "out")
    assert all(torch.equal(out.tensor(name), stored[name]) for name in out.files if name != NAME)


@pytest.mark.parametrize("scales", [None, torch.ones(2, 2), torch.ones(3, 2, dtype=torch.uint8)])
def test_scales_that_are_not_the_blocks_are_refused(folder: Path, scales: torch.Tensor | None) -> None:
    stored = load_file(folder / "model.safetensors")
    del stored[NAME + "_scale_inv"]
    save_file(stored | ({} if scales is None else {NAME + "_scale_inv": scales}), folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is of torch.float8_e4m3fn and \[300, 200\], and its"):
        HFFolder(folder).tensor(NAME)


def test_other_quantization_is_left_for_who_reads_the_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = None
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TrainError, match="quantization_config=.* cannot be trained"):
        family_of(HFFolder(folder).config)


@pytest.mark.parametrize("kind", ["megatron", "fsdp"])
def test_trainers_have_what_was_multiplied_out(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_model(tmp_path / "m", "qwen3")
    source = HFFolder(folder)
    tensors = {name: source.tensor(name) for name in source.files}
    tensors[NAME] = (tensors[NAME] * 100).to(torch.float8_e4m3fn)
    tensors[NAME + "_scale_inv"] = torch.full((1, 1), 0.01)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(source.config | {"quantization_config": QUANTIZED}))
    with backend(settings(folder, train_backend=kind)) as made:
        found = dict(made.export_weights())[NAME].cpu()
    assert torch.equal(found, tensors[NAME].float() * 0.01)
