"""Combined rewards: weights, gates, step rewards."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import GraderFailure, SettingsError
from agentrl.rm_hub.combine import CreditStrategy, Otherwise, StepRewards, Verifier, Weighted, combine
from agentrl.rm_hub.grade import Grade
from agentrl.rollout.functions import RewardFunction
from agentrl.sample import Sample

ARGS = SimpleNamespace()


def sample(response: str = "Paris", label: str | None = "paris", turns: int = 0, **metadata: Any) -> Sample:
    made = Sample(prompt="Capital of France?", response=response, label=label, metadata=metadata)
    made.set_prompt_tokens([1])
    for turn in range(1, turns + 1):
        made.append_model([turn], [-1.0], turn=turn, text="")
        made.append_observation([9], turn=turn)
    made.response = response
    return made


def length(item: Sample) -> float:
    return len(item.response) / 10


async def slow_half(item: Sample) -> float:
    return 0.5


def right(item: Sample) -> float:
    return 1.0


def has_answer(item: Sample) -> bool:
    return "Paris" in item.response


def never(item: Sample) -> bool:
    return False


async def test_named_graders_and_functions_are_summed_with_their_weights() -> None:
    reward = combine(Weighted("exact_match", 1.0), Weighted(length, 0.2), Weighted(slow_half, -1.0))
    item = sample()
    assert await reward(ARGS, item) == pytest.approx(1.0 + 0.2 * 0.5 - 0.5)
    assert item.metadata["rewards"] == pytest.approx(
        {"score": 0.6, "trajectory": 0.6, "exact_match": 1.0, "length": 0.5, "slow_half": 0.5}
    )


async def test_the_one_number_or_all_parts_by_the_reward_key() -> None:
    reward = combine(Weighted("f1", name="overlap"))
    assert await reward(SimpleNamespace(reward_key=None), sample()) == 1.0
    got = await reward(SimpleNamespace(reward_key="overlap"), sample())
    assert got == {"score": 1.0, "trajectory": 1.0, "overlap": 1.0}
    got = await reward(SimpleNamespace(eval_reward_key="score"), sample())
    assert isinstance(got, dict)
    with pytest.raises(GraderFailure, match="no such score; it has score, trajectory, overlap"):
        await reward(SimpleNamespace(reward_key="f1"), sample())


@pytest.mark.parametrize(
    ("otherwise", "amount", "score"), [("zero", 1.0, 0.0), ("multiply", 0.25, 0.25), ("subtract", 0.4, 0.6)]
)
async def test_a_failed_gate_acts_on_the_whole(otherwise: Otherwise, amount: float, score: float) -> None:
    reward = combine(Weighted(right), gate=Verifier(never, otherwise, amount))
    item = sample()
    assert await reward(ARGS, item) == pytest.approx(score)
    assert item.metadata["rewards"]["verifier_never"] == 0.0
    passing = combine(Weighted(right), gate=[Verifier(has_answer, otherwise, amount)])
    assert await passing(ARGS, sample()) == 1.0


async def test_a_closed_gate_asks_no_grader() -> None:
    asked = []

    def expensive(item: Sample) -> float:
        asked.append(item)
        return 1.0

    item = sample()
    assert await combine(Weighted(expensive), gate=Verifier(never))(ARGS, item) == 0.0
    assert not asked
    assert item.metadata["rewards"]["expensive"] == 0.0


async def test_a_grader_can_be_the_check() -> None:
    reward = combine(Weighted(slow_half), gate=Verifier("exact_match"))
    assert await reward(ARGS, sample()) == 0.5
    assert await reward(ARGS, sample("Rome")) == 0.0


async def test_a_part_of_a_grade_can_count() -> None:
    def graded(item: Sample) -> Grade:
        return Grade(0.0, False, parts={"style": 0.8})

    assert await combine(Weighted(graded, part="style"))(ARGS, sample()) == 0.8
    with pytest.raises(GraderFailure, match="it has style"):
        await combine(Weighted(graded, part="tone"))(ARGS, sample())
    with pytest.raises(GraderFailure, match="it has none"):
        await combine(Weighted(length, part="tone"))(ARGS, sample())


# ---- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distribution", "credit"),
    [("last", [0.1, 0.2, 1.3]), ("all", [1.1, 1.2, 1.3]), ("average", [1.3 / 3, 1.6 / 3, 1.9 / 3])],
)
async def test_distribution_over_steps(distribution: CreditStrategy, credit: list[float]) -> None:
    item = sample(turns=3, step_rewards=[1, 2, 3])
    reward = combine(Weighted(right), steps=StepRewards(distribution, weight=0.1))
    assert await reward(ARGS, item) == pytest.approx(1.6)
    assert item.metadata["step_credit"] == pytest.approx(credit)
    assert item.metadata["rewards"]["steps"] == pytest.approx(0.6)


async def test_steps_without_rewards_and_trajectories_without_steps() -> None:
    item = sample(turns=2, step_rewards=[1.0])
    assert await combine(Weighted(right), steps=StepRewards("average"))(ARGS, item) == 2.0
    assert item.metadata["step_credit"] == [1.5, 0.5]
    item = sample()
    assert await combine(Weighted(right), steps=StepRewards())(ARGS, item) == 1.0
    assert item.metadata["step_credit"] == [1.0]


async def test_a_step_reward_belongs_to_its_turn() -> None:
    item = sample(turns=3, step_rewards=[None, 2.0, None])
    assert await combine(Weighted(right), steps=StepRewards("average", 0.5))(ARGS, item) == 2.0
    assert item.metadata["step_credit"] == pytest.approx([1 / 3, 1 / 3 + 1.0, 1 / 3])


@pytest.mark.parametrize(
    ("distribution", "credit"), [("last", [0, 4, 1]), ("all", [1, 5, 1]), ("average", [1 / 3, 4 + 1 / 3, 1 / 3])]
)
async def test_the_turns_of_earlier_siblings_have_a_share_too(
    distribution: CreditStrategy, credit: list[float]
) -> None:
    item = sample(step_rewards=[None, 4.0, None])
    for turn in (2, 3):
        item.append_model([turn], [-1.0], turn=turn)
    item.response = "Paris"
    assert await combine(Weighted(right), steps=StepRewards(distribution))(ARGS, item) == 5.0
    assert item.metadata["step_credit"] == pytest.approx(credit)


async def test_step_rewards_alone() -> None:
    item = sample(step_rewards=[1.0, 2.0, 6.0])
    assert await combine(steps=StepRewards())(ARGS, item) == 9.0
    assert item.metadata["step_credit"] == [1.0, 2.0, 6.0]


async def test_the_credit_is_that_of_the_entry_that_trains() -> None:
    for key, credited in (("score", True), ("overlap", False)):
        item = sample(turns=2)
        await combine(Weighted("f1", name="overlap"), steps=StepRewards())(SimpleNamespace(reward_key=key), item)
        assert ("step_credit" in item.metadata) is credited


@pytest.mark.parametrize(
    ("otherwise", "credit"), [("zero", [0.0, 0.0]), ("multiply", [0.5, 1.0]), ("subtract", [1.0, 1.5])]
)
async def test_a_failed_gate_reaches_the_steps(otherwise: Otherwise, credit: list[float]) -> None:
    item = sample(turns=2, step_rewards=[1.0, 1.0])
    reward = combine(Weighted(right), gate=Verifier(never, otherwise, 0.5), steps=StepRewards())
    assert await reward(ARGS, item) == pytest.approx(math.fsum(credit))
    assert item.metadata["step_credit"] == pytest.approx(credit)


@given(
    st.lists(st.none() | st.floats(-10, 10), max_size=6),
    st.floats(-10, 10),
    st.integers(0, 4),
    st.sampled_from(["last", "average"]),
    st.floats(-2, 2),
)
def test_last_and_average_credit_sum_to_the_one_number(
    rewards: list[float], trajectory: float, more: int, distribution: CreditStrategy, weight: float
) -> None:
    steps = StepRewards(distribution, weight)
    credit = steps.credit(rewards, trajectory, max(1, len(rewards) + more))
    assert math.fsum(credit) == pytest.approx(trajectory + steps.total(rewards), abs=1e-9)


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, "1", True, math.nan, math.inf, [1.0]])
async def test_scores_that_are_no_numbers(bad: Any) -> None:
    with pytest.raises(GraderFailure, match="must be a finite number") as caught:
        await combine(Weighted(lambda item: bad, name="odd"))(ARGS, sample())
    assert caught.value.kind == "grader_bad_reward"
    if bad is not None:
        with pytest.raises(GraderFailure, match="step reward 2 must be a finite number"):
            await combine(steps=StepRewards())(ARGS, sample(step_rewards=[1.0, bad]))


async def test_a_check_must_say_true_or_false() -> None:
    with pytest.raises(GraderFailure, match="must return True or False, got 0.5"):
        await combine(Weighted(length), gate=Verifier(slow_half))(ARGS, sample())  # type: ignore[arg-type]


async def test_failures_of_graders_come_out_as_they_are() -> None:
    with pytest.raises(GraderFailure) as caught:
        await combine(Weighted("exact_match"), Weighted(length))(ARGS, sample(label=None))
    assert caught.value.kind == "grader_no_label"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: combine(), "nothing to combine"),
        (lambda: combine(Weighted("exact_matsh")), "did you mean 'exact_match'"),
        (lambda: combine(Weighted("f1"), Weighted("f1", 2.0)), "f1 occurs twice"),
        (lambda: combine(Weighted("f1", name="score")), "score occurs twice"),
        (lambda: Weighted("f1", math.nan), "finite"),
        (lambda: Verifier("f2"), "no such grader"),
        (lambda: Verifier(never, "halve"), "one of zero, multiply, subtract"),  # type: ignore[arg-type]
        (lambda: StepRewards("first"), "one of last, all, average"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_said_when_it_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make()


async def test_it_is_a_reward_function_of_the_rollout() -> None:
    function = RewardFunction.of(combine(Weighted("exact_match"), Weighted(length)), "reward", group=False)
    assert await function(ARGS, [sample(), sample("Rome")]) == pytest.approx([1.5, 0.4])
