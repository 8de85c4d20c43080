"""Checkpoint folders without tensors: found if complete, replaced atomically, distinguished by their manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import CheckpointError
from agentrl.runfolder import MANIFEST
from agentrl.train.checkpoints import Found, Identity, check_curve, latest, read_manifest, replace_folder, writing
from agentrl.train.settings import TrainSettings

IDENTITY = Identity({"layers": 2, "hidden": 64}, {"optimizer": "adam"})


def manifest(step: int) -> dict[str, object]:
    return {"step": step, "stepped": True, "layout": {"tp": 1}, **dataclasses.asdict(IDENTITY)}


def write(path: Path, step: int, content: str = "weights", interrupted: bool = False) -> None:
    with writing(path, manifest(step), leader=True, barrier=lambda: None) as folder:
        (folder / content).touch()
        if interrupted:
            raise KeyboardInterrupt


def test_a_checkpoint_is_there_when_it_is_whole(tmp_path: Path) -> None:
    write(tmp_path / "one", 1)
    write(tmp_path / "two", 2)
    write(tmp_path / "one", 1, "again")
    found = latest(tmp_path)
    assert found is not None
    assert (found.path.name, found.step) == ("two", 2)
    assert {p.name for p in (tmp_path / "one").iterdir()} == {"again", MANIFEST}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]


def test_an_interrupted_one_is_not_found_and_leaves_the_old_one(tmp_path: Path) -> None:
    write(tmp_path / "one", 1)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "one", 2, "half", interrupted=True)
    assert (tmp_path / "one" / "weights").exists()
    shutil.copytree(tmp_path / "one", tmp_path / ".two.partial")
    (tmp_path / ".two.partial" / MANIFEST).write_text('{"format": 1, "step": 9}')
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 1
    write(tmp_path / "one", 3)
    assert {p.name for p in (tmp_path / "one").iterdir()} == {"weights", MANIFEST}
    assert sorted(p.name for p in tmp_path.iterdir()) == [".two.partial", "one"]


def test_other_ranks_write_between_the_barriers_and_rename_nothing(tmp_path: Path) -> None:
    (tmp_path / ".one.partial").mkdir()
    passed: list[bool] = []
    barrier = lambda: passed.append((tmp_path / ".one.partial").exists())  # noqa: E731
    with writing(tmp_path / "one", {"step": 1}, leader=False, barrier=barrier) as folder:
        assert folder == tmp_path / ".one.partial"
        assert len(passed) == 1
    assert passed == [True] * 3
    assert not (tmp_path / "one").exists()


def test_what_differs_is_said(tmp_path: Path) -> None:
    write(tmp_path / "one", 1)
    found = read_manifest(tmp_path / "one")
    IDENTITY.check(tmp_path / "one", found)
    with pytest.raises(CheckpointError, match="another model: hidden is 64 there and 32 here; layers is 2 there and 3"):
        Identity({"layers": 3, "hidden": 32}, IDENTITY.optimizer).check(tmp_path / "one", found)
    with pytest.raises(CheckpointError, match="the optimizer differs: optimizer is 'adam' there and 'muon' here"):
        Identity(IDENTITY.model, {"optimizer": "muon"}).check(tmp_path / "one", found)
    (tmp_path / "one" / MANIFEST).write_text('{"format": 9}')
    with pytest.raises(CheckpointError, match="expected a checkpoint of format 1, got {'format': 9}"):
        latest(tmp_path)


def test_files_that_are_not_as_they_were_written_are_named(tmp_path: Path) -> None:
    write(tmp_path / "one", 1)
    found = read_manifest(tmp_path / "one")
    (tmp_path / "one" / "weights").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="one is damaged: weights is .*move it away"):
        IDENTITY.check(tmp_path / "one", found)
    (tmp_path / "one" / "weights").unlink()
    with pytest.raises(CheckpointError, match="one is damaged: weights is .* there and None here"):
        IDENTITY.check(tmp_path / "one", found)
    del found["files"]
    IDENTITY.check(tmp_path / "one", found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "expected a checkpoint of format 1, got \\[\\]"),
        ("{", "not a complete checkpoint"),
        ("[" * 5000, "not a complete checkpoint"),
        ('{"format": 1}', "step in manifest.json is damaged: None"),
        ('{"format": 1, "step": true}', "step in manifest.json is damaged: True"),
        ('{"format": 1, "step": 3, "stepped": 1}', "stepped in manifest.json is damaged: 1"),
        ('{"format": 1, "step": 3, "stepped": true, "layout": {}, "model": []}', "model in manifest.json is damaged"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str, said: str) -> None:
    write(tmp_path / "one", 1)
    (tmp_path / "one" / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=f"one: {said}"):
        latest(tmp_path)


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    for name in ("new", "place"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    replace_folder(tmp_path / "new", tmp_path / "place")
    assert [p.name for p in tmp_path.iterdir()] == ["place"]
    assert (tmp_path / "place" / "file").read_text() == "new"


def test_finding_a_checkpoint_needs_no_torch() -> None:
    code = "import sys; from agentrl.train.checkpoints import latest; latest('.'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=600).returncode == 0


@pytest.mark.parametrize(
    ("end", "total", "settings", "jump"),
    [
        (
            100,
            200,
            {"lr_decay_style": "cosine"},
            "until optimizer step 100, .* until step 200. .* from 0 to 0.5. Set --lr-decay-iters 100 ",
        ),
        (150, 120, {"lr_decay_style": "linear"}, "--lr-decay-iters 150 to keep"),
        (
            100,
            200,
            {"lr_warmup_fraction": 0.9},
            r"\(constant\) changes until optimizer step 100, .* from 1 to 0.556.*then constant at 1\)",
        ),
        (100, 100, {"lr_decay_style": "cosine"}, None),
        (100, 200, {"lr_decay_style": "cosine", "lr_decay_iters": 200}, None),
        (120, 200, {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 20}, None),
        (100, 200, {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 20}, "from 0 to 1. Set"),
        (
            100,
            200,
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 120},
            "from 0 to 0.782. Set --lr-decay-iters 100 --lr-wsd-decay-iters 20 to keep",
        ),
        (120, 250, {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 150}, None),
        (None, 200, {"lr_decay_style": "cosine"}, None),
        (100, 200, {}, None),
    ],
)
def test_a_jump_of_the_learning_rate_has_to_be_asked_for(
    tmp_path: Path, end: int | None, total: int, settings: dict[str, Any], jump: str | None
) -> None:
    entries = {"lr_decay_end": end, "lr_wsd_decay_iters": 20}
    with writing(tmp_path, manifest(9) | entries, leader=True, barrier=lambda: None):
        pass
    asked = TrainSettings(lr=1.0, **settings)
    with pytest.raises(CheckpointError, match=jump) if jump else contextlib.nullcontext():
        check_curve(Found(tmp_path, 9), asked, total, 100)


@pytest.mark.parametrize(
    ("steps", "settings", "jump"),
    [
        (
            4,
            {"lr_warmup_iters": 40},
            "took 4 optimizer steps per rollout, this run takes 1.* from 1 to 0.2.*-rollout 4",
        ),
        (4, {"lr_decay_style": "cosine", "lr_decay_iters": 80}, "Keep --num-steps-per-rollout 4"),
        (4, {}, None),
        (1, {"lr_warmup_iters": 40}, None),
        (4, {"lr_decay_style": "linear"}, None),
        (4, {"lr_decay_style": "linear", "lr_decay_iters": 100}, None),
        (4, {"lr_decay_style": "linear", "lr_decay_iters": 50}, "from 0.9 to 0.8"),
    ],
)
def test_another_number_of_steps_per_rollout_does_not_move_the_learning_rate(
    tmp_path: Path, steps: int, settings: dict[str, Any], jump: str | None
) -> None:
    with writing(
        tmp_path,
        manifest(9) | {"steps_per_rollout": steps, "lr_decay_end": 100 * steps},
        leader=True,
        barrier=lambda: None,
    ):
        pass
    with pytest.raises(CheckpointError, match=jump) if jump else contextlib.nullcontext():
        check_curve(Found(tmp_path, 9), TrainSettings(lr=1.0, **settings), 100, 10)


def test_a_run_that_ended_inside_its_warm_up_may_go_on(tmp_path: Path) -> None:
    with writing(tmp_path, manifest(4) | {"lr_decay_end": 5}, leader=True, barrier=lambda: None):
        pass
    check_curve(Found(tmp_path, 4), TrainSettings(lr=1.0, lr_warmup_iters=10, lr_decay_style="cosine"), 100, 5)
