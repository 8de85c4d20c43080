"""Comparison of two evaluations: paired by prompt, with intervals that separate a difference from chance."""

from pathlib import Path

import numpy as np
import orjson
import pytest
from click.testing import CliRunner

from agentrl.buffer.store import TrajectoryStore
from agentrl.cli.eval import command
from agentrl.errors import DataError
from agentrl.groups import Group
from agentrl.observability.compare import Difference, compare, find_evaluation
from agentrl.rollout.stats import describe, means
from agentrl.runfolder import EVALUATIONS, TRAJECTORIES
from tests.buffer.make import finished


def played(prompt: int, *rewards: float) -> Group:
    group = finished(prompt, n=len(rewards))
    for sample, reward in zip(group, rewards, strict=True):
        sample.reward = reward
    return group


def at_row(row: int, group: Group) -> Group:
    """Give a group another row of the data."""
    for sample in group:
        sample.group_index = row
    return group


def write(folder: Path, groups: list[Group], *, step: int = 0, name: str = "dev") -> Path:
    with TrajectoryStore(folder / TRAJECTORIES, 10_000) as store:
        store.add("eval", name, step, groups)
    row = {"time": 1.0, "step": step, "set": name, "checkpoint": f"model-{step}", "metrics": {}}
    with (folder / EVALUATIONS).open("ab") as file:
        file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    return folder


def measured(before: Path | str, after: Path | str, name: str = "dev") -> dict[str, Difference]:
    _, found = compare(find_evaluation(str(before)), find_evaluation(str(after)))[name]
    return {one.measure: one for one in found}


def test_pairing_sees_what_two_means_hide(tmp_path: Path) -> None:
    hard = np.random.default_rng(1).random(200)
    before = write(tmp_path / "a", [played(i, h, h) for i, h in enumerate(hard)])
    better = write(tmp_path / "b", [played(i, h + 0.02, h + 0.02) for i, h in enumerate(hard)])
    reward = measured(before, better)["reward"]
    assert reward.difference == pytest.approx(0.02)
    assert reward.interval == pytest.approx((0.02, 0.02)), "the prompts' own spread is not in it"
    chance = np.random.default_rng(2).normal(0, 0.1, 200)
    same = write(tmp_path / "c", [played(i, h + d) for i, (h, d) in enumerate(zip(hard, chance, strict=True))])
    interval = measured(before, same)["reward"].interval
    assert interval is not None
    low, high = interval
    assert low < 0 < high
    assert high - low == pytest.approx(2 * 1.96 * 0.1 / 200**0.5, rel=0.2), "as wide as the normal interval"


def test_prompts_count_once_however_often_they_were_played(tmp_path: Path) -> None:
    before = write(tmp_path / "a", [played(0, 0.0), played(1, 1.0)])
    after = write(tmp_path / "b", [played(0, 1.0, 1.0, 1.0, 0.0), played(1, 1.0), played(9, 0.0)])
    prompts, _ = compare(find_evaluation(str(before)), find_evaluation(str(after)))["dev"]
    assert prompts == 2, "prompt 9 is in one of them"
    solved = measured(before, after)["solved"]
    assert (solved.before, solved.after) == (0.5, 0.875)


def test_a_prompt_that_is_there_twice_is_two(tmp_path: Path) -> None:
    twice = [at_row(row, played(0, float(row))) for row in range(2)]
    before, after = write(tmp_path / "a", twice), write(tmp_path / "b", twice)
    assert compare(find_evaluation(str(before)), find_evaluation(str(after)))["dev"][0] == 2
    assert measured(before, after)["reward"].difference == 0.0


def test_a_repetition_that_failed_does_not_shift_the_others(tmp_path: Path) -> None:
    rows = [at_row(row, played(0, float(row % 2))) for row in range(20)]
    before, after = write(tmp_path / "a", rows), write(tmp_path / "b", rows[1:])
    assert compare(find_evaluation(str(before)), find_evaluation(str(after)))["dev"][0] == 19
    assert measured(before, after)["reward"].interval == (0.0, 0.0)


def test_a_prompt_is_found_at_another_place_of_other_data(tmp_path: Path) -> None:
    before = write(tmp_path / "a", [played(i, 0.0) for i in range(5)])
    after = write(tmp_path / "b", [at_row(i + 100, played(i, 1.0)) for i in range(5)])
    assert measured(before, after)["reward"].interval == (1.0, 1.0)


def test_a_session_of_several_samples_counts_once(tmp_path: Path) -> None:
    """The figures are those of the evaluation: rewards once, lengths as a sum."""
    before = write(tmp_path / "a", [played(i, 1.0, 0.0) for i in range(5)])
    groups = [played(i, 1.0, 0.0, 0.0, 0.0) for i in range(5)]
    for group in groups:
        for sample in group[1:]:
            sample.rollout_id = 1
    found = measured(before, write(tmp_path / "b", groups))
    assert (found["reward"].before, found["reward"].after) == (0.5, 0.5)
    of_one = groups[0][0].response_length
    assert found["response tokens"].difference == of_one, "sessions of one and of three samples"
    metrics = means([row for group in groups for row in describe(group, None)])
    assert found["reward"].after == metrics["reward"]
    assert found["response tokens"].after == metrics["response_length"]


def test_few_prompts_have_no_interval(tmp_path: Path) -> None:
    for prompts in (1, 4, 5):
        before = write(tmp_path / f"a{prompts}", [played(i, 0.0) for i in range(prompts)])
        after = write(tmp_path / f"b{prompts}", [played(i, 1.0) for i in range(prompts)])
        assert measured(before, after)["reward"].interval == ((1.0, 1.0) if prompts == 5 else None)


def test_evaluations_are_found_by_folder_and_number(tmp_path: Path) -> None:
    write(tmp_path / "run" / "evaluation", [played(0, 0.0)], step=0)
    write(tmp_path / "run" / "evaluation", [played(0, 1.0)], step=3)
    last, first = find_evaluation(f"{tmp_path}/run"), find_evaluation(f"{tmp_path}/run@0")
    assert (last.step, first.step) == (3, 0)
    assert (last.checkpoint, first.checkpoint) == ("model-3", "model-0")
    with pytest.raises(DataError, match="has the evaluations 0, 3"):
        find_evaluation(f"{tmp_path}/run@2")
    with pytest.raises(DataError, match="no evaluation's trajectories here"):
        find_evaluation(str(tmp_path))
    write(tmp_path / "other", [played(0, 0.0)], name="test")
    with pytest.raises(DataError, match="none in common"):
        compare(last, find_evaluation(f"{tmp_path}/other"))


def test_the_command_says_whose_figures_it_compares(tmp_path: Path) -> None:
    before = write(tmp_path / "a", [played(0, 0.0)])
    after = write(tmp_path / "b", [played(0, 1.0)])
    done = CliRunner().invoke(command, ["--compare", str(before), str(after)])
    assert done.exit_code == 0, done.output
    assert "model-0" in done.output
    (line,) = [line.split() for line in done.output.splitlines() if line.startswith("  reward")]
    assert line == ["reward", "0", "1", "+1", "too", "few", "prompts"]
