"""The metrics logger: written rows, rows that a resume keeps, and errors for broken files."""

import json
import math
import re
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from agentrl.errors import DataError, SettingsError
from agentrl.observability.metrics import MetricsLogger, read_metrics, wandb_arguments
from agentrl.observability.settings import ObservabilitySettings

PLAIN = ObservabilitySettings(use_tensorboard=False)


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]


def log(folder: Path, first: int, last: int, *, resume: int = 0, settings: ObservabilitySettings = PLAIN) -> None:
    with MetricsLogger(settings, folder, resume_step=resume) as logger:
        for step in range(first, last):
            logger.log(step, {"rollout/reward": step / 10})


def test_a_row_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    with MetricsLogger(PLAIN, tmp_path / "run") as logger:
        logger.log(0, {"a": 1.5})
        row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert (row["step"], row["a"]) == (0, 1.5)
    assert row["time"] > 1e9


def test_values_that_are_not_finite_are_valid_json_and_come_back(tmp_path: Path) -> None:
    with MetricsLogger(PLAIN, tmp_path) as logger:
        logger.log(0, {"loss": math.nan, "norm": math.inf, "low": -math.inf, "fine": 1})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert json.loads(text)["loss"] is None
    row = next(read_metrics(tmp_path / "metrics.jsonl"))
    assert math.isnan(row["loss"])
    assert (row["norm"], row["low"], row["fine"]) == (math.inf, -math.inf, 1.0)


@pytest.mark.parametrize("resume", [1, 3, 5])
def test_a_resume_drops_the_rows_that_no_checkpoint_proves(tmp_path: Path, resume: int) -> None:
    log(tmp_path, -1, 5)
    log(tmp_path, resume, 6, resume=resume)
    assert steps(tmp_path) == [-1, 0, 1, 2, 3, 4, 5]
    assert list(tmp_path.glob(".metrics*")) == []


def test_a_fresh_start_keeps_nothing_of_a_life_without_a_checkpoint(tmp_path: Path) -> None:
    log(tmp_path, -1, 2)
    log(tmp_path, -1, 1)
    assert steps(tmp_path) == [-1, 0]


def test_a_resume_keeps_values_that_are_not_finite(tmp_path: Path) -> None:
    with MetricsLogger(PLAIN, tmp_path) as logger:
        logger.log(0, {"loss": math.nan})
    log(tmp_path, 1, 2, resume=1)
    assert math.isnan(next(read_metrics(tmp_path / "metrics.jsonl"))["loss"])


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    log(tmp_path, 0, 3)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":3,"ti')
    assert steps(tmp_path) == [0, 1, 2]
    log(tmp_path, 3, 4, resume=3)
    assert steps(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("line", ["{", "[]", '{"a": 1}', '{"step": "x"}'])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":0}\n' + line + "\n")
    with pytest.raises(DataError, match=r"metrics.jsonl line 2"):
        list(read_metrics(tmp_path / "metrics.jsonl"))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        list(read_metrics(tmp_path / "metrics.jsonl"))


def test_log_interval_skips_steps_but_no_evaluation(tmp_path: Path) -> None:
    with MetricsLogger(ObservabilitySettings(use_tensorboard=False, log_interval=3), tmp_path) as logger:
        for step in range(5):
            logger.log(step, {"rollout/reward": 0.0})
        logger.log(4, {"eval/dev/reward": 1.0})
    assert steps(tmp_path) == [0, 3, 4]


def test_tensorboard_reads_the_events_and_purges_what_a_resume_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files of one second are sorted by their numbers as text: 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    log(tmp_path, 0, 4, settings=ObservabilitySettings())
    log(tmp_path, 2, 5, resume=2, settings=ObservabilitySettings())
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = events.Scalars("rollout/reward")
    assert [event.step for event in found] == [0, 1, 2, 3, 4]
    assert found[4].value == pytest.approx(0.4)


def test_tensorboard_can_be_elsewhere(tmp_path: Path) -> None:
    log(tmp_path, 0, 1, settings=ObservabilitySettings(tensorboard_dir=str(tmp_path / "tb")))
    assert list((tmp_path / "tb").iterdir())


def test_wandb_that_is_not_installed_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SettingsError, match=r"agentrl-sdk\[wandb\]"):
        MetricsLogger(ObservabilitySettings(use_wandb=True), tmp_path)


def test_wandb_is_asked_for_what_the_settings_say_and_a_resumed_run_keeps_its_name(tmp_path: Path) -> None:
    own = {"wandb_team": "t", "wandb_mode": "offline", "wandb_host": "http://w", "wandb_dir": str(tmp_path / "w")}
    asked = wandb_arguments(ObservabilitySettings(wandb_name="n", wandb_random_suffix=True, **own), tmp_path, None)
    assert (asked["entity"], asked["mode"], asked["dir"]) == ("t", "offline", str(tmp_path / "w"))
    assert asked["settings"] == {"base_url": "http://w"}
    assert (tmp_path / "w").is_dir()
    assert re.fullmatch("n_[0-9a-f]{6}", asked["name"])
    assert asked["group"] is None
    again = wandb_arguments(ObservabilitySettings(wandb_name="n", wandb_random_suffix=True), tmp_path, "id")
    assert again["id"] == "id"
    assert "name" not in again
    plain = wandb_arguments(ObservabilitySettings(wandb_name="n"), tmp_path, "id")
    assert (plain["name"], plain["dir"], plain["settings"]) == ("n", str(tmp_path), None)


@pytest.mark.parametrize("failed", [False, True])
def test_wandb_knows_whether_the_run_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool) -> None:
    ended: list[int | None] = []
    run = SimpleNamespace(id="abc", finish=lambda exit_code=None: ended.append(exit_code))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    with suppress(ValueError), MetricsLogger(ObservabilitySettings(use_tensorboard=False, use_wandb=True), tmp_path):
        if failed:
            raise ValueError("the trainer died")
    assert ended == [1 if failed else None]
