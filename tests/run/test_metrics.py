"""A rollout's numbers are means over trajectories, also where one became several samples."""

from agentrl.rollout.stats import RolloutStats, describe
from agentrl.run.metrics import rollout_metrics
from agentrl.sample import Sample, Status


def part(index: int, turn: int, shared: int | None, status: Status = Status.COMPLETED) -> Sample:
    sample = Sample(group_index=0, index=index, rollout_id=shared, reward=float(index), non_generation_time=1.0)
    sample.set_prompt_tokens([1])
    sample.append_model([2, 3], [-1.0, -1.0], "0", turn=turn)
    sample.append_observation([4], turn=turn)
    sample.metadata["counters"] = {"tool_calls": 1, "tool_ok": 1}
    sample.status = status
    return sample


def test_siblings_are_one_trajectory() -> None:
    siblings = [part(0, 1, 0), part(0, 2, 0), part(0, 3, 0, Status.TRUNCATED)]
    group = [*siblings, part(1, 1, None)]
    found = rollout_metrics([group], RolloutStats(offered=describe(group, None)), None)
    for where in ("rollout", "offered"):
        assert found[f"{where}/response_length"] == (9 + 3) / 2
        assert found[f"{where}/model_tokens"] == (6 + 2) / 2
        assert found[f"{where}/truncated"] == 0.5
        assert found[f"{where}/turns"] == (3 + 1) / 2
        assert found[f"{where}/tool_calls"] == (3 + 1) / 2
        assert found[f"{where}/non_generation_seconds"] == (3 + 1) / 2
        assert found[f"{where}/reward"] == 0.5


def test_a_rollout_in_which_nothing_was_finished_offers_no_mean() -> None:
    found = rollout_metrics([[part(0, 1, None)]], RolloutStats(), None)
    assert not [name for name in found if name.startswith("offered/")]


def test_answers_that_were_not_judged_are_counted_by_kind() -> None:
    late, judged = part(0, 1, None), part(1, 1, None)
    late.metadata["grade"], judged.metadata["grade"] = {"unjudged": "grader_timeout"}, {"unjudged": ""}
    found = rollout_metrics([[late, judged]], RolloutStats(), None)
    assert {name: value for name, value in found.items() if "unjudged" in name} == {
        "rollout/unjudged/grader_timeout": 0.5
    }
