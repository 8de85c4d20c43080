"""A rollout's metrics are means over trajectories, also if one became several samples."""

import pytest

from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.stats import RolloutStats, Tokens, describe
from agentrl.run.metrics import rollout_metrics
from agentrl.sample import Sample, SpecInfo, Status

SETTINGS = RolloutSettings()


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
    found = rollout_metrics([group], RolloutStats(offered=tuple(describe(group, None))), SETTINGS)
    for where in ("rollout", "offered"):
        assert found[f"{where}/response_length"] == (9 + 3) / 2
        assert found[f"{where}/model_tokens"] == (6 + 2) / 2
        assert found[f"{where}/truncated"] == 0.5
        assert found[f"{where}/turns"] == (3 + 1) / 2
        assert found[f"{where}/tool_calls"] == (3 + 1) / 2
        assert found[f"{where}/non_generation_seconds"] == (3 + 1) / 2
        assert found[f"{where}/reward"] == 0.5


def test_the_share_of_each_stop_reason_counts_trajectories() -> None:
    siblings, alone = [part(0, 1, 0), part(0, 2, 0)], part(1, 1, None)
    siblings[0].stop("done")
    siblings[1].stop("max_turns")
    alone.stop("gave_up")
    found = rollout_metrics([[*siblings, alone]], RolloutStats(), SETTINGS)
    shares = {name: value for name, value in found.items() if "/stop/" in name}
    assert shares == {"rollout/stop/max_turns": 0.5, "rollout/stop/gave_up": 0.5}


def test_the_standard_error_takes_prompts_as_given() -> None:
    """Rewards 0 and 2 have variance 2; two groups of two trajectories, one of them split. One alone has no spread."""
    spread, equal = [part(0, 1, 0), part(0, 2, 0), part(2, 1, None)], [part(1, 1, None), part(1, 1, None)]
    found = rollout_metrics([spread, equal], RolloutStats(), SETTINGS)
    assert found["rollout/reward_standard_error"] == pytest.approx((2 / 2) ** 0.5 / 2)
    assert "rollout/reward_standard_error" not in rollout_metrics([spread, equal[:1]], RolloutStats(), SETTINGS)


def test_a_rollout_in_which_nothing_was_finished_offers_no_mean() -> None:
    found = rollout_metrics([[part(0, 1, None)]], RolloutStats(), SETTINGS)
    assert not [name for name in found if name.startswith("offered/")]


def test_a_rollout_that_was_ready_before_has_no_rate() -> None:
    rates = [
        rollout_metrics([[part(0, 1, None)]], RolloutStats(tokens=Tokens(generated), seconds=2.0), SETTINGS).get(
            "perf/rollout_tokens_per_second"
        )
        for generated in (0, 12)
    ]
    assert rates == [None, 6.0]


def test_answers_that_were_not_judged_are_counted_by_kind() -> None:
    late, judged = part(0, 1, None), part(1, 1, None)
    late.metadata["grade"], judged.metadata["grade"] = {"unjudged": "grader_timeout"}, {"unjudged": ""}
    found = rollout_metrics([[late, judged]], RolloutStats(), SETTINGS)
    assert {name: value for name, value in found.items() if "unjudged" in name} == {
        "rollout/unjudged/grader_timeout": 0.5
    }


def test_pass_rates_count_trajectories_and_not_what_they_fanned_out_into() -> None:
    groups = [[part(0, 1, None), part(1, 1, None)], [part(1, 1, 7), part(1, 2, 7), part(1, 1, None)]]
    found = rollout_metrics(groups, RolloutStats(), SETTINGS)
    assert found["rollout/pass@1"] == 0.75
    assert found["rollout/pass@2"] == 1.0
    assert "rollout/pass@4" not in found


def test_drafted_tokens_are_shared_out_over_all_requests() -> None:
    plain, fast = part(0, 1, None), part(1, 1, None)
    assert "rollout/spec_accept_rate" not in rollout_metrics([[plain]], RolloutStats(), SETTINGS)
    plain.spec_info, fast.spec_info = SpecInfo(1, 10, 5, 6), SpecInfo(9, 10, 5, 14)
    found = rollout_metrics([[plain, fast]], RolloutStats(), SETTINGS)
    assert (found["rollout/spec_accept_rate"], found["rollout/spec_accept_length"]) == (0.5, 2.0)


def test_trajectories_are_counted_by_what_their_reward_says() -> None:
    settings = RolloutSettings(reward_key="score", log_reward_category="why")
    samples = [part(index, 1, None) for index in range(4)]
    for sample, why in zip(samples, ("late", "late", "x" * 99, None), strict=True):
        sample.reward = {"score": 0.0} | ({} if why is None else {"why": why})
    found = rollout_metrics([samples], RolloutStats(), settings)
    assert {name: value for name, value in found.items() if "error_cat" in name} == pytest.approx(
        {"rollout/error_cat/late": 0.5, "rollout/error_cat/none": 0.25, f"rollout/error_cat/{'x' * 40}": 0.25}
    )
