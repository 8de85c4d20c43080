"""The warm start: it runs, continues from a model, and names the phrases and forms that a model fails."""

from pathlib import Path

import pytest

from agentrl.errors import TrainError
from examples.tiny_models.calculator import CalculatorLessons
from examples.tiny_models.warm_start import WarmStartSettings, in_own_process, practise, warm_start

LESSONS = CalculatorLessons()
SMALL = WarmStartSettings(
    layers=1,
    hidden=32,
    skill_steps=2,
    skill_rounds=1,
    skill_batch=2,
    least_right=0,
    least_probability=0,
    habit_steps=2,
    habit_batch=2,
)


@pytest.mark.slow
def test_a_small_warm_start_runs_and_can_be_taught_further(tmp_path: Path) -> None:
    made = in_own_process(warm_start, tmp_path / "made", LESSONS, SMALL)
    further = in_own_process(practise, tmp_path / "further", made, LESSONS, SMALL)
    assert (made / "model.safetensors").read_bytes() != (further / "model.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["further", "made"]


@pytest.mark.slow
def test_a_warm_start_that_does_not_learn_names_every_phrase_and_form(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="after 1 rounds") as caught:
        in_own_process(warm_start, tmp_path / "made", LESSONS, SMALL.model_copy(update={"least_right": 0.98}))
    for name in ("'How much is {}?': 0.0% of", "'call {}*{}+{}': 0.0% of", "'answer': 0.0% of"):
        assert name in str(caught.value)
    assert not list(tmp_path.iterdir())
