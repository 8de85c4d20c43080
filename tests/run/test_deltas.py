"""Copies of weights by differences: bit-identical to whole copies, and damage is detected."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.run import deltas
from agentrl.run.deltas import fetch, write_delta
from tests.support.nightly import nightly

SIZE = 1_500_000


def write(folder: Path, weights: torch.Tensor) -> Path:
    """Write a version as the trainer does."""
    folder.mkdir()
    save_file({"a": weights.bfloat16(), "norm": torch.ones(64, dtype=torch.bfloat16)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def size_of(version: Path) -> int:
    return sum(file.stat().st_size for file in (version / "delta").iterdir())


@pytest.mark.parametrize("steps", nightly([10, 50], 1))
def test_differences_at_a_small_learning_rate_are_bit_equal_and_small(tmp_path: Path, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    master = torch.nn.Parameter(0.02 * torch.randn(SIZE, generator=generator))
    optimizer = torch.optim.AdamW([master], lr=1e-6, weight_decay=0.0)
    old, copies = write(tmp_path / "0", master.detach()), tmp_path / "copies"
    fetch(old, copies, "v0", None)
    shares = []
    for step in range(1, steps + 1):
        master.grad = torch.randn(SIZE, generator=generator)
        optimizer.step()
        new = write(tmp_path / str(step), master.detach())
        write_delta(old, new)
        shares.append(size_of(new) / (new / "model.safetensors").stat().st_size)
        whole = contents(new)
        (new / "model.safetensors").unlink()  # the copy is made from the difference alone
        fetch(new, copies, f"v{step}", f"v{step - 1}")
        assert contents(copies / f"v{step}") == whole
        assert sorted(path.name for path in copies.iterdir() if path.is_dir()) == sorted([f"v{step - 1}", f"v{step}"])
        (new / "model.safetensors").write_bytes(whole["model.safetensors"])
        old = new
    final = load_file(copies / f"v{steps}" / "model.safetensors")["a"]
    assert torch.equal(final, master.detach().bfloat16())
    assert not torch.equal(final, load_file(tmp_path / "0" / "model.safetensors")["a"])
    assert max(shares) < 0.1


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "a bit of a block": lambda delta, base: flip(delta / "blocks"),
    "half of the blocks": lambda delta, base: (delta / "blocks").write_bytes((delta / "blocks").read_bytes()[:100]),
    "no index": lambda delta, base: (delta / "index.json").unlink(),
    "a damaged index": lambda delta, base: (delta / "index.json").write_text("{"),
    "another base": lambda delta, base: flip(base / "model.safetensors"),
    "no base": lambda delta, base: (base / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_difference_is_refused_and_the_whole_version_is_copied(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltas, "_BLOCK", 4096)
    generator = torch.Generator().manual_seed(1)
    old = write(tmp_path / "0", torch.randn(10_000, generator=generator))
    new = write(tmp_path / "1", torch.randn(10_000, generator=generator))
    write_delta(old, new)
    fetch(old, tmp_path / "copies", "v0", None)
    DAMAGE[what](new / "delta", tmp_path / "copies" / "v0")
    with caplog.at_level(logging.WARNING):
        fetch(new, tmp_path / "copies", "v1", "v0")
    assert "the whole version is copied" in caplog.text
    assert contents(tmp_path / "copies" / "v1") == contents(new)


def test_only_blocks_that_changed_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "_BLOCK", 4096)
    old, new = tmp_path / "0", tmp_path / "1"
    for folder, changed in (old, b""), (new, b"changed"):
        folder.mkdir()
        data = bytes(range(256)) * 64
        (folder / "one").write_bytes(data[:5000] + changed + data[5000 + len(changed) :])
        (folder / "same").write_bytes(data)
    (new / "fresh").write_bytes(b"x" * 5000)
    write_delta(old, new)
    index = (new / "delta" / "index.json").read_text()
    assert {name: [block[0] for block in file["blocks"]] for name, file in json.loads(index).items()} == {
        "fresh": [0, 4096],
        "one": [4096],
        "same": [],
    }
    fetch(old, tmp_path / "copies", "v0", None)
    for file in new.glob("*"):
        if file.is_file():
            file.rename(tmp_path / file.name)
    fetch(new, tmp_path / "copies", "v1", "v0")
    assert {n: (tmp_path / n).read_bytes() for n in ("fresh", "one", "same")} == contents(tmp_path / "copies" / "v1")
    fetch(new, tmp_path / "copies", "v1", "v0")  # a second engine of the machine finds it
