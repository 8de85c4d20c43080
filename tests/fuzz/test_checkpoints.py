"""Mutated checkpoints: manifests alone, and every file of a tiny model's checkpoint."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

from agentrl.runfolder import MANIFEST
from agentrl.train.checkpoints import Found, Identity, latest, read_manifest, writing
from tests.fuzz.mutate import counts, fuzz, of_bytes, of_tree

IDENTITY = Identity({"layers": 2, "hidden": 64}, {"optimizer": "adam"})
ENTRIES = {"step": 3, "stepped": True, "layout": {"tp": 1, "dp": 2}, **dataclasses.asdict(IDENTITY)}


@counts
def test_mutated_manifests(tmp_path: Path, count: int) -> None:
    with writing(tmp_path / "one", ENTRIES, leader=True, barrier=lambda: None) as folder:
        (folder / "weights").touch()
    whole = (tmp_path / "one" / MANIFEST).read_bytes()

    def mutant(rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return of_bytes(rng, whole, (b"[" * 5000, b"9" * 5000, b"NaN", b"null", b'"', b"true", b"\xff"))
        return json.dumps(of_tree(rng, json.loads(whole))).encode("utf-8", "surrogatepass")

    def read(mutant: bytes) -> tuple[Found | None, dict[str, Any]]:
        (tmp_path / "one" / MANIFEST).write_bytes(mutant)
        found, manifest = latest(tmp_path), read_manifest(tmp_path / "one")
        IDENTITY.check(tmp_path, manifest)
        return found, manifest

    def sound(read: tuple[Found | None, dict[str, Any]]) -> None:
        found, manifest = read
        assert found == Found(tmp_path / "one", manifest["step"])
        assert {type(manifest[name]) for name in ("step", "stepped", "layout")} == {int, bool, dict}

    assert fuzz(count, mutant, read, sound)["accepted"]


@counts
def test_mutated_checkpoints(tmp_path: Path, count: int) -> None:
    """Each change of a file is detected, except some in the manifest itself."""
    from tests.support.tiny_models import make_tiny_model
    from tests.train.megatron.helpers import backend, make_batch, settings

    logging.disable(logging.CRITICAL)  # torch logs a page for each
    with backend(settings(make_tiny_model(tmp_path / "model", "qwen3"))) as made:
        made.train(make_batch(), 0)
        made.save(tmp_path / "all" / "one", 1)
        shutil.copytree(tmp_path / "all", tmp_path / "whole")
        files = {file: file.read_bytes() for file in sorted((tmp_path / "all").rglob("*")) if file.is_file()}

        def mutant(rng: random.Random) -> tuple[Path, bytes | None]:
            file = rng.choice(list(files))
            return file, None if rng.random() < 0.02 else of_bytes(rng, files[file])

        def read(mutant: tuple[Path, bytes | None]) -> tuple[bool, int]:
            file, raw = mutant
            try:
                file.unlink()
                if raw is not None:
                    file.write_bytes(raw)
                return raw == files[file] or file.name == MANIFEST, made.load(tmp_path / "all")
            finally:
                file.write_bytes(files[file])

        def sound(read: tuple[bool, int]) -> None:
            same, step = read
            assert same
            assert type(step) is int

        try:
            assert fuzz(count, mutant, read, sound)["CheckpointError"]
            assert made.load(tmp_path / "whole") == 1
        finally:
            logging.disable(logging.NOTSET)


@counts
def test_mutated_torch_dist(tmp_path: Path, count: int) -> None:
    """After any change, either tensors of the listed shapes are read or an error names the problem."""
    import torch

    from agentrl.train import torch_dist

    parts = [torch_dist.TensorPiece("w", (i,), (3,), torch.full((2, 4), float(i))) for i in range(3)]
    torch_dist.write(tmp_path, [*parts, torch_dist.TensorPiece("v", (), (), torch.ones(5))], {})
    whole = (tmp_path / ".metadata").read_bytes()

    def read(mutant: bytes) -> list[bool]:
        (tmp_path / ".metadata").write_bytes(mutant)
        found = torch_dist.TorchDist(tmp_path)
        return [found.read(key).shape == shape for key, shape in found.shapes.items()]

    def sound(read: list[bool]) -> None:
        assert all(read)

    assert fuzz(count, lambda rng: of_bytes(rng, whole), read, sound)["accepted"]


@counts
def test_mutated_indexes(tmp_path: Path, count: int) -> None:
    """A run reads the index before torch does: the index is read, or refused by name, and changes no class."""
    import torch

    from agentrl.train import torch_dist

    torch_dist.write(tmp_path, [torch_dist.TensorPiece("w", (i,), (3,), torch.ones(2)) for i in range(3)], {})
    whole = (tmp_path / ".metadata").read_bytes()
    known = tuple(torch_dist._DESCRIPTIONS.values())
    before = [dict(vars(kind)) for kind in known if isinstance(kind, type)]
    names = (b"cposix\nsystem\n(S'x'\ntR", b"cbuiltins\neval\n", b"ctorch.storage\n_load_from_bytes\n")
    setting = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'planner_data'\nI1\nstb0"

    def read(mutant: bytes) -> None:
        (tmp_path / ".metadata").write_bytes(mutant)
        with torch_dist.as_data(tmp_path):
            pass

    def sound(_: None) -> None:
        assert [dict(vars(kind)) for kind in known if isinstance(kind, type)] == before

    def mutant(rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            at = rng.randrange(2, len(whole))
            return whole[:2] + rng.choice((*names, setting)) + whole[at if rng.random() < 0.5 else 2 :]
        return of_bytes(rng, whole, (*names, setting, b"\x95" + b"\xff" * 8, b"\x8e" + b"\x7f" * 8, b"L9" * 99))

    found = fuzz(count, mutant, read, sound)
    assert found["accepted"]
    assert found["CheckpointError"]
    sound(None)
