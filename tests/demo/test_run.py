"""The demo's settings and its reading of results; the run itself is in `make demo`."""

import json
from pathlib import Path

import pytest

from agentrl import tiny
from agentrl.config import RunSettings
from agentrl.demo.demonstrations import CalculatorLessons
from agentrl.demo.example import held_out, run_example
from agentrl.demo.run import DEMO
from agentrl.errors import DataError


def test_settings_are_complete(tmp_path: Path) -> None:
    tiny.create(tmp_path / "model", corpus=CalculatorLessons().corpus())
    settings = RunSettings.from_cli(DEMO.argv(tmp_path / "run", tmp_path / "model", 3))
    settings.check_complete("train")
    asked = (tmp_path / "run/data/train.jsonl").read_text().splitlines()
    assert len(asked) >= settings.rollout.num_rollout * settings.rollout.rollout_batch_size
    assert settings.train.num_steps_per_rollout == 1
    assert settings.algorithm.eps_clip_high == 0.28
    assert settings.rollout.rollout_seed == settings.train.seed == 3


def test_scores_are_read_in_order(tmp_path: Path) -> None:
    rows = [
        {"step": -1, "eval/held_out/reward": 0.25},
        {"step": 0, "loss": 1.0},
        {"step": 9, "eval/held_out/reward": 0.9},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert held_out(tmp_path, "reward") == [0.25, 0.9]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(DataError, match="found it 1 times"):
        held_out(tmp_path, "reward")


def test_learned_needs_a_gain_and_a_level() -> None:
    def learned(*success: float) -> bool:
        return DEMO.learned(success)

    assert learned(0.3, 0.9)
    assert not learned(0.3, 0.7)
    assert not learned(0.85, 0.9)


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="not empty"):
        run_example(DEMO, tmp_path, tmp_path / "cache", say=print)
