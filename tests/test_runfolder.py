"""The run's folder: one process at a time, and no command writes into another's."""

import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from agentrl.errors import SettingsError
from agentrl.runfolder import RunFolder


def opened(path: Path, command: str = "train") -> AbstractContextManager[RunFolder]:
    return RunFolder.open(str(path), '{"a": 1}', command)


def test_a_folder_in_use_is_refused_and_untouched(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        before = (folder.path / "settings.json").stat().st_mtime_ns
        with (
            pytest.raises(SettingsError, match="in use by another agentrl process"),
            opened(tmp_path),
        ):
            pass
        assert (folder.path / "settings.json").stat().st_mtime_ns == before
        assert (folder.path / "settings.json").read_text() == '{"a": 1}\n'
    with opened(tmp_path):
        pass


def test_rollout_and_evaluation_leave_a_run_alone(tmp_path: Path) -> None:
    with (
        opened(tmp_path) as run,
        opened(tmp_path, "rollout") as rollout,
        opened(tmp_path, "eval") as evaluation,
    ):
        assert run.path == tmp_path
        assert {rollout.path, evaluation.path} == {tmp_path / "rollouts", tmp_path / "evaluation"}


def test_the_path_of_the_model_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(tmp_path / "run") as folder:
        folder.started_from("./model")
        assert (folder.path / "hf_checkpoint.txt").read_text() == f"{tmp_path / 'model'}\n"


def test_the_model_is_of_one_checkpoint(tmp_path: Path) -> None:
    old, new = tmp_path / "checkpoints" / "rollout_000001", tmp_path / "checkpoints" / "rollout_000002"
    for checkpoint in (old, new):
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    with opened(tmp_path) as folder:
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
        opened(tmp_path / "file" / "run"),
    ):
        pass


@pytest.mark.parametrize("command", ["train", "rollout", "eval"])
def test_new_folders_are_their_owners_alone(tmp_path: Path, command: str) -> None:
    with RunFolder.open(str(tmp_path / "run"), "{}", command) as folder:
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "run", folder.path)} == {0o700}
