"""The calculator as a verifiers taskset: the demo's settings and problems, and it learns."""

import json
import os
from pathlib import Path

import pytest

from agentrl.config import RunSettings
from agentrl.demo.example import run_example
from agentrl.demo.run import DEMO
from agentrl.demo.task import make_problems
from examples.verifiers_calculator.run import EXAMPLE, write_data

FOLDER = EXAMPLE.config.parent


def test_the_settings_are_those_of_the_demo_with_a_taskset_in_place_of_its_environment() -> None:
    own, demo = RunSettings.from_file(EXAMPLE.config), RunSettings.from_file(DEMO.config)
    assert own.rollout.env == "verifiers:calculator-v1"
    rollout = own.rollout.model_copy(
        update={
            "env": demo.rollout.env,
            "max_turns": None,
            "rollout_max_concurrency": demo.rollout.rollout_max_concurrency,
        }
    )
    data = own.data.model_copy(update={"label_key": demo.data.label_key})
    assert own.model_copy(update={"rollout": rollout, "data": data}) == demo


def test_the_rows_name_other_tasks_for_each_seed_and_the_same_held_out_ones(tmp_path: Path) -> None:
    def tasks(path: Path) -> list[int]:
        return [json.loads(line)["metadata"]["task"] for line in path.read_text().splitlines()]

    (train, test), (other, same) = (write_data(tmp_path / str(seed), seed) for seed in (0, 1))
    assert tasks(test) == tasks(same) == list(range(200))
    assert tasks(train) == list(range(200, 520))
    assert tasks(other) == list(range(520, 840))


async def test_the_first_tasks_are_the_held_out_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    import verifiers.v1 as vf

    from agentrl.adapters.verifiers import Tasks

    monkeypatch.syspath_prepend(str(FOLDER))
    tasks = Tasks(
        vf.load_taskset(vf.taskset_config_type("calculator-v1")(id="calculator-v1")).select(vf.SelectConfig())
    )
    held_out = [(await tasks.at(number)).data for number in range(200)]
    assert [(each.prompt, each.answer) for each in held_out] == [
        (problem.question, str(problem.answer)) for problem in make_problems(200, "test", 0)
    ]
    trained = {(await tasks.at(number)).data.prompt for number in range(200, 520)}
    assert not trained & {each.prompt for each in held_out}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]))
    success = run_example(EXAMPLE, tmp_path / "run", say=print)
    assert success[0] <= 0.4
    assert success[-1] >= 0.8
