"""Reading and writing Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agentrl.errors import CheckpointError
from agentrl.train.hf import HFFolder, write
from tests.support.disks import small_disk
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> HFFolder:
    return HFFolder(make_tiny_model(tmp_path_factory.mktemp("models") / "m", "qwen3"))


def stream(source: HFFolder) -> Iterator[tuple[str, torch.Tensor]]:
    for name in source.files:
        yield name, source.tensor(name)


def test_one_file_and_shards_hold_the_same(source: HFFolder, tmp_path: Path) -> None:
    write(tmp_path / "one", stream(source), source=source)
    write(tmp_path / "many", stream(source), source=source, max_shard_bytes=50_000)
    one, many = HFFolder(tmp_path / "one"), HFFolder(tmp_path / "many")
    assert len(set(one.files.values())) == 1 < len(set(many.files.values()))
    for name in source.files:
        assert torch.equal(one.tensor(name), source.tensor(name))
        assert torch.equal(many.tensor(name), source.tensor(name))


def test_conversion_is_recorded_in_the_config(source: HFFolder, tmp_path: Path) -> None:
    write(tmp_path / "half", ((name, tensor.bfloat16()) for name, tensor in stream(source)), source=source)
    half = HFFolder(tmp_path / "half")
    assert {half.tensor(name).dtype for name in half.files} == {torch.bfloat16}
    assert "bfloat16" in (half.config.get("dtype"), half.config.get("torch_dtype"))


def test_a_failed_write_leaves_the_old_folder(source: HFFolder, tmp_path: Path) -> None:
    write(tmp_path / "m", stream(source), source=source)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(stream(source))
        raise ConnectionError("lost")

    with pytest.raises(ConnectionError):
        write(tmp_path / "m", broken(), source=source)
    assert set(HFFolder(tmp_path / "m").files) == set(source.files)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_full_disk_is_named_with_the_folder(source: HFFolder, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(CheckpointError, match=r"disk/m: .*No space left on device.*; free some space"):
            write(disk / "m", stream(source), source=source)
        assert [*disk.iterdir()] == []


def test_what_is_missing_is_named(source: HFFolder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        HFFolder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(source.config))
    with pytest.raises(CheckpointError, match="safetensors"):
        _ = HFFolder(tmp_path).files
    with pytest.raises(CheckpointError, match=r"lm_tail\.weight"):
        source.tensor("lm_tail.weight")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="JSON"):
        HFFolder(tmp_path)
