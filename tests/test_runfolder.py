"""The run's folder: one process at a time, and no command writes into another's."""

import os
from pathlib import Path

import pytest

from agentrl.config import RunSettings
from agentrl.errors import SettingsError
from agentrl.runfolder import RunFolder


def settings(path: Path) -> RunSettings:
    return RunSettings.from_flat({"output_dir": str(path)})


def test_a_folder_in_use_is_refused_and_untouched(tmp_path: Path) -> None:
    with RunFolder.open(settings(tmp_path)) as folder:
        before = (folder.path / "settings.json").stat().st_mtime_ns
        with (
            pytest.raises(SettingsError, match="in use by another agentrl process"),
            RunFolder.open(settings(tmp_path)),
        ):
            pass
        assert (folder.path / "settings.json").stat().st_mtime_ns == before
    with RunFolder.open(settings(tmp_path)):
        pass


def test_rollout_and_evaluation_leave_a_run_alone(tmp_path: Path) -> None:
    with (
        RunFolder.open(settings(tmp_path)) as run,
        RunFolder.open(settings(tmp_path), "rollout") as rollout,
        RunFolder.open(settings(tmp_path), "eval") as evaluation,
    ):
        assert run.path == tmp_path
        assert {rollout.path, evaluation.path} == {tmp_path / "rollouts", tmp_path / "evaluation"}


def test_the_model_is_of_one_checkpoint(tmp_path: Path) -> None:
    old, new = tmp_path / "checkpoints" / "rollout_000001", tmp_path / "checkpoints" / "rollout_000002"
    for checkpoint in (old, new):
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    with RunFolder.open(settings(tmp_path)) as folder:
        assert not folder.has_model_of(old)
        folder.wrote_model_of(old)
        assert not folder.has_model_of(old), "the model itself is missing"
        folder.model.mkdir()
        for name in ("config.json", "model.safetensors"):
            (folder.model / name).write_text("")
        assert folder.has_model_of(old)
        assert not folder.has_model_of(new), "a run that went on and was killed before it wrote the model"
        os.utime(old / "manifest.json", ns=(1, 1))
        assert not folder.has_model_of(old), "another checkpoint in the same place"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(SettingsError, match=r"--output-dir .*file/run cannot be written"),
        RunFolder.open(settings(tmp_path / "file" / "run")),
    ):
        pass
