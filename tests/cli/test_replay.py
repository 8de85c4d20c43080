"""The output of `agentrl replay`: changes are shown, failures first."""

from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.check.replay import ReplayedTrajectory
from agentrl.cli.replay import show
from tests.support.viewed import trajectory

SETTINGS: Any = SimpleNamespace(rollout=SimpleNamespace(reward_key=None))


def played(at: int, then: float, now: float | None, diverged: str = "", failure: str = "") -> ReplayedTrajectory:
    sample = trajectory(at, at)
    sample.reward = then
    return ReplayedTrajectory([sample], now, diverged, failure)


def test_what_failed_or_went_another_way_is_shown_among_many(capsys: pytest.CaptureFixture[str]) -> None:
    same = [played(at, 0.0, 0.0) for at in range(20)]
    failed, diverged = played(20, 0.0, None, failure="KeyError 'gold'"), played(21, 0.0, 0.0, diverged="token 7")
    show([*same, diverged, failed], SETTINGS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "22 trajectories: mean reward 0, now 0"
    assert lines[-2:] == [
        "  group 20 sample 20: 0.0 -> None; KeyError 'gold'",
        "  group 21 sample 21: 0.0 -> 0.0; token 7",
    ]
    show([*(played(at, 0.0, 1.0) for at in range(20)), failed], SETTINGS)
    assert "KeyError" in capsys.readouterr().out.splitlines()[4]


def test_without_a_reward_on_both_sides_there_is_no_mean(capsys: pytest.CaptureFixture[str]) -> None:
    show([played(0, 1.0, None, failure="KeyError 'gold'")], SETTINGS)
    assert capsys.readouterr().out.splitlines()[0] == "1 trajectories: no reward to compare"
