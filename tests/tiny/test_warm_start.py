"""The warm start: found again by its settings, honest when it does not learn."""

from pathlib import Path

import pytest

from agentrl.demo.demonstrations import CalculatorLessons
from agentrl.errors import TrainError
from agentrl.tiny.warm_start import WarmStartSettings, in_own_process, warm_start

LESSONS = CalculatorLessons()


def test_the_folder_follows_what_changes_the_result() -> None:
    base = WarmStartSettings()
    assert base.folder_name(LESSONS) == WarmStartSettings(train_threads=2).folder_name(LESSONS)
    others = (base, WarmStartSettings(seed=1), WarmStartSettings(habit_steps=9))
    assert len({settings.folder_name(LESSONS) for settings in others}) == 3


SMALL = WarmStartSettings(
    layers=1, hidden=32, skill_steps=2, skill_rounds=1, skill_batch=2, skill_success=0, habit_steps=2, habit_batch=2
)


@pytest.mark.slow
def test_a_small_warm_start_runs_and_is_found_again(tmp_path: Path) -> None:
    made = in_own_process(tmp_path, LESSONS, SMALL)
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    assert warm_start(tmp_path, LESSONS, SMALL) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [made.name]


@pytest.mark.slow
def test_a_warm_start_that_does_not_learn_says_so(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="reproduced 0% of held-out demonstrations after 1 rounds"):
        in_own_process(tmp_path, LESSONS, SMALL.model_copy(update={"skill_success": 1.0}))
