"""The examples that train like the demo: their settings are valid together, and (at night) they learn."""

import importlib
from pathlib import Path

import pytest

from agentrl.config import RunSettings
from agentrl.demo.example import Example, run_example
from agentrl.envs import Environment, load_environment

LEARNING = (
    "eval_multi_task",
    "fully_async",
    "multi_agent",
    "on_policy_distillation",
    "tau_bench",
    "true_on_policy",
)


def example(name: str) -> Example:
    found = importlib.import_module(f"examples.{name}.run").EXAMPLE
    assert isinstance(found, Example)
    return found


@pytest.mark.parametrize("name", LEARNING)
def test_the_settings_hold_together(name: str, tmp_path: Path) -> None:
    settings = RunSettings.from_file(example(name).config)
    assert isinstance(settings.rollout.env, str)
    assert issubclass(load_environment(settings.rollout.env), Environment)
    train, held_out = example(name).write_data(tmp_path, 0)
    asked = train.read_text().splitlines()
    assert len(asked) >= settings.rollout.num_rollout * settings.rollout.rollout_batch_size
    sets = [held_out] if held_out.suffix == ".jsonl" else tmp_path.glob("*.jsonl")
    assert not any(set(asked) & set(file.read_text().splitlines()) for file in sets if file != train)


@pytest.mark.parametrize(
    "name", sorted({file.parent.name for file in Path("examples").glob("*/run.py")} - {"reproducibility"})
)
def test_the_settings_are_found_from_every_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = example(name).config
    monkeypatch.chdir(tmp_path)
    assert config.is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LEARNING)
def test_it_learns(name: str, tmp_path: Path) -> None:
    success = run_example(example(name), tmp_path / "run", say=print)
    assert success[0] <= 0.4
    assert success[-1] >= 0.8
