"""The run's folder: one process at a time, and no command writes into another's."""

from pathlib import Path

import pytest

from agentrl.cluster.folder import RunFolder
from agentrl.config import RunSettings
from agentrl.errors import SettingsError


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


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(SettingsError, match=r"--output-dir .*file/run cannot be written"),
        RunFolder.open(settings(tmp_path / "file" / "run")),
    ):
        pass
