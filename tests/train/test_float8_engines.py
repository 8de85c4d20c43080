"""Weights for engines that hold float8 blocks: the sender quantizes them."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.errors import CheckpointError
from agentrl.modelfolder import read_config
from agentrl.train.float8 import EngineForm, quantise
from agentrl.train.hf import HFFolder
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import backend, settings
from tests.train.test_float8 import QUANTIZED


def reference(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize block by block, as DeepSeek describes: the largest absolute value of a block becomes 448."""
    scales = torch.ones(math.ceil(weight.size(0) / 128), math.ceil(weight.size(1) / 128))
    made = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scales.size(0)):
        for j in range(scales.size(1)):
            rows, columns = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            block = weight[rows, columns].float()
            if (most := block.abs().max()) > 0:
                scales[i, j] = most / 448
            made[rows, columns] = torch.clamp(block / scales[i, j], -448, 448).to(torch.float8_e4m3fn)
    return made, scales


def same(ours: Tensor, theirs: Tensor) -> bool:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
    return ours.dtype == theirs.dtype and torch.equal(ours.view(kind), theirs.view(kind))


@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    exponent=st.integers(-20, 20),
    zeros=st.booleans(),
    kind=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 99),
)
def test_blocks_equal_the_reference_bit_for_bit(
    rows: int, columns: int, exponent: int, zeros: bool, kind: torch.dtype, seed: int
) -> None:
    weight = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent).to(kind)
    if zeros:
        weight[:128, :128] = 0
    for ours, theirs in zip(quantise(weight), reference(weight), strict=True):
        assert same(ours, theirs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return published_in_blocks(tmp_path / "m")


def published_in_blocks(path: Path) -> Path:
    """Make a mixture of experts, published in blocks: all matrices of its layers except the routers."""
    folder = make_tiny_model(path, "qwen3_moe")
    source, tensors = HFFolder(folder), dict[str, Tensor]()
    for name in source.files:
        tensors[name] = source.tensor(name)
        if name.endswith("_proj.weight"):
            tensors[name], tensors[name + "_scale_inv"] = reference(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(source.config | {"quantization_config": QUANTIZED}))
    return folder


def test_an_update_has_the_names_shapes_and_dtypes_of_the_folder(folder: Path, tmp_path: Path) -> None:
    published = load_file(folder / "model.safetensors")
    with backend(settings(folder)) as made:
        specs = {spec.name: spec for spec in made.weight_specs()[0]}
        whole = {name: tensor.cpu() for name, tensor in made.export_weights()}
        made.save_hf(tmp_path / "served", served=True)
        made.save_hf(tmp_path / "saved")
    assert {name: (spec.dtype, spec.shape) for name, spec in specs.items()} == {
        name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in published.items()
    }
    served = load_file(tmp_path / "served" / "model.safetensors")
    assert served.keys() == published.keys()
    for name, tensor in whole.items():
        sent = (
            {"": tensor}
            if name + "_scale_inv" not in served
            else dict(zip(("", "_scale_inv"), reference(tensor), strict=True))
        )
        assert all(same(served[name + ending], part) for ending, part in sent.items()), name
    assert read_config(tmp_path / "served") == read_config(folder)
    assert "quantization_config" not in read_config(tmp_path / "saved")


def test_scales_of_another_format_are_refused(folder: Path) -> None:
    config = read_config(folder)
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="scale_fmt 'ue8m0'"):
        EngineForm(HFFolder(folder))
