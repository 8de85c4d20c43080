"""How the verdict reads rewards; `verdicts` tests its causes with real runs."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import run
from agentrl.config.fields import all_fields
from agentrl.observability.metrics import MetricsLogger
from agentrl.observability.settings import ObservabilitySettings
from agentrl.observability.verdict import CAUSES, RunVerdict, judge, verdict_lines


def rows(rewards: Iterable[float], **others: float) -> list[dict[str, Any]]:
    named = {name.replace("__", "/"): value for name, value in others.items()}
    return [{"step": at, "train/steps": 1, "rollout/reward": r, **named} for at, r in enumerate(rewards)]


def verdict(rewards: Iterable[float], **others: float) -> RunVerdict:
    found = judge(rows(rewards, **others))
    assert found is not None
    return found


def test_a_rise_above_the_noise_is_learning() -> None:
    assert verdict(0.3 + 0.03 * step for step in range(15)).outcome == "learned"
    assert verdict(-5 + 0.3 * step for step in range(15)).outcome == "learned"


def test_flat_rewards_seldom_pass_for_learning() -> None:
    """Among a hundred runs of pure noise."""
    chance = random.Random(0)
    found = [verdict(chance.gauss(0.4, 0.05) for _ in range(15)).outcome for _ in range(100)]
    assert found.count("learned") <= 5
    assert found.count("got worse") <= 8


def test_two_chance_successes_are_not_learning() -> None:
    """Scatter between rollouts is small here; scatter within the groups shows how little two successes mean."""
    rare = rows([0.0] * 13 + [1 / 64] * 2)
    for row in rare:
        row["rollout/reward_standard_error"] = row["rollout/reward"]
    found = judge(rare)
    assert found is not None
    assert found.outcome == "did not learn"


@pytest.mark.parametrize(("last", "outcome"), [(0.9, "learned"), (0.45, "got worse"), (0.1, "got worse")])
def test_a_fall_from_the_top_counts(last: float, outcome: str) -> None:
    wave = [0.01, -0.01] * 4
    assert verdict([0.3 + w for w in wave] + [0.9 + w for w in wave] + [last + w for w in wave]).outcome == outcome


def test_groups_that_a_filter_dropped_count() -> None:
    """The filter keeps groups with some successes: their mean reward need not rise."""
    filtered = rows([0.5, 0.52] * 6)
    for row in filtered:
        row["offered/reward"] = row["step"] / 12
    assert verdict_lines(filtered)[0].startswith("verdict: learned")


def test_a_high_start_needs_no_rise() -> None:
    high = [0.93, 0.9, 0.95, 0.92, 0.9, 0.94, 0.92, 0.93]
    assert verdict(high, **{"rollout/pass@1": 0.92}).outcome == "stayed high"
    assert verdict(high).outcome == "did not learn"


def test_few_rollouts_are_too_few() -> None:
    assert verdict([0, 0, 0, 1, 1]).outcome == "too short to say"


def test_rollouts_that_were_not_logged_are_not_counted_as_read() -> None:
    logged = rows([0.3 + 0.01 * step for step in range(100)])[::10]
    found = judge(logged)
    assert found is not None
    assert found.figures.endswith("over 91 rollouts, 10 of them logged")
    assert verdict([0.3] * 10).figures.endswith("over 10 rollouts")


def test_what_did_not_train_for_reward_is_not_judged() -> None:
    """An `agentrl rollout`, supervised fine-tuning, a distillation, an empty file."""
    played = [{"step": at, "rollout/reward": at} for at in range(15)]
    taught = [{"step": at, "train/steps": 1, "train/nll": 1} for at in range(15)]
    distilled = rows([0] * 15, **{"train/opd_reverse_kl": 0.1})
    assert [verdict_lines(one) for one in (played, taught, distilled, [])] == [[], [], [], []]


def test_a_run_without_a_cause_says_so() -> None:
    first, second = verdict([0.4, 0.41] * 8).lines
    assert "did not learn" in first
    assert "no cause stands out" in second


def test_report_and_page_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsLogger(ObservabilitySettings(use_tensorboard=False), tmp_path) as logger:
        for row in rows(step / 10 for step in range(10)):
            logger.log(row.pop("step"), row)
    assert run(["report", str(tmp_path)]) == 0
    page, *told = capsys.readouterr().out.splitlines()
    assert [line[:16] for line in told] == ["verdict: learned"]
    assert told[0] in Path(page).read_text()


def test_remedies_name_flags_that_exist() -> None:
    named = {word.strip(".,;()") for cause in CAUSES for word in cause.remedy.split() if word.startswith("--")}
    assert named - {"--play"} <= {field.flag for field in all_fields().values()}
    assert len(named) > 10
