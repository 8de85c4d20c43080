"""A sample's data about its turns: credit that replaces the reward, equal states, weights from the user."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms import AlgorithmSettings, algorithm_of
from agentrl.errors import SampleError
from agentrl.sample import Sample
from agentrl.train.batch import TrainBatch
from agentrl.train.objective import estimate
from agentrl.train.observations import credit_of
from tests.train.test_objective import one_step


def played(turns: range, reward: float | None = 1.0, shown: int = 7, **metadata: Any) -> Sample:
    """Make a sample with these turns of two tokens each, and one token `shown` between them."""
    sample = Sample(index=41, reward=reward, metadata=metadata)
    sample.set_prompt_tokens([1, turns.start])
    for turn in turns:
        sample.append_model([10 + turn, 20 + turn], [-1.0, -1.0], turn=turn)
        if turn < turns.stop - 1:
            sample.append_observation([shown], turn=turn)
    return sample


def turn_values(sample: Sample, values: list[float]) -> list[float]:
    """Return the value at the last token of each turn; all other values must be 0."""
    ends = [2 + 3 * at - 1 for at in range((sample.response_length + 1) // 3)]
    assert all(value == 0 for at, value in enumerate(values) if at not in ends)
    return [values[at] for at in ends]


def credit(sample: Sample, reward: float = 1.0) -> list[float]:
    return turn_values(sample, credit_of(sample, reward))


def test_step_rewards_and_what_the_reward_has_beyond_them() -> None:
    assert credit(played(range(1, 7), step_rewards=[0.5, None, -1, None, 0.25, None])) == [0.5, 0, -1, 0, 0.25, 1.25]
    assert credit(played(range(1, 4))) == [0, 0, 1]
    assert credit(played(range(1, 4), step_rewards=[0.25])) == [0.25, 0, 0.75]
    assert credit(played(range(1, 3), step_rewards=[0.5, 0.25, 0.125])) == [0.5, 0.5]
    assert credit(played(range(1, 3), step_rewards=[0.5, None]), math.nan) == [0, 0]


def test_a_combined_rewards_credit_is_taken_exactly() -> None:
    assert credit(played(range(1, 4), step_rewards=[9.0], step_credit=[0.1, 0.2, 0.3])) == [0.1, 0.2, 0.3]


def test_siblings_have_their_own_turns_and_the_last_of_each_all_that_came_after() -> None:
    first = played(range(1, 4), step_rewards=[0.5, None, 0.25])
    second = played(range(4, 7), step_rewards=[0.5, None, 0.25, None, -0.5, None])
    assert credit(first) == [0.5, 0, 0.5]
    assert credit(second) == [0, -0.5, 0.75]
    whole = [0.5, 0, 0.25, 0, -0.5, 0.75]
    assert credit(played(range(1, 7), step_rewards=[0.5, None, 0.25, None, -0.5, None])) == whole
    for sample in (first, second):  # as the agent loop credits a combined reward to all of them
        sample.metadata["step_credit"] = whole
    assert (credit(first), credit(second)) == ([0.5, 0, 0.5], [0, -0.5, 0.75])


@given(st.lists(st.none() | st.floats(-2, 2), max_size=8), st.integers(1, 6), st.integers(1, 6), st.floats(-3, 3))
def test_returns_are_as_without_the_split(rewards: list[float | None], own: int, later: int, reward: float) -> None:
    turns = own + later
    rewards = [*rewards, *[None] * turns][:turns]
    whole = credit(played(range(1, turns + 1), step_rewards=rewards), reward)
    parts = [
        credit(played(range(1, own + 1), step_rewards=rewards[:own]), reward),
        credit(played(range(own + 1, turns + 1), step_rewards=rewards), reward),
    ]
    returns = [math.fsum(part[at:]) for part in parts for at in range(len(part))]
    assert returns == pytest.approx([math.fsum(whole[at:]) for at in range(turns)], abs=1e-9)
    assert math.fsum(whole) == pytest.approx(reward, abs=1e-9)


def test_a_turn_without_tokens_is_the_one_befores() -> None:
    sample = played(range(1, 2), step_rewards=[0.25, 0.5, None])
    sample.append_observation([7], turn=2)
    sample.append_model([5, 6], [-1, -1], turn=3)
    assert credit(sample) == [0.75, 0.25]


def test_without_turns_all_of_it_stands_at_the_end() -> None:
    plain = Sample(tokens=[1, 2, 3], response_length=2, reward=0.5, rollout_log_probs=[-1.0, -2.0])
    assert credit_of(plain, 0.5) == [0, 0.5]
    assert credit_of(Sample(tokens=[1]), 0.5) == []


def test_the_batch_reads_the_entry_that_trains_and_removed_samples() -> None:
    plain, gone = played(range(1, 3)), played(range(1, 3), None, step_rewards=[0.5, None])
    gone.remove_sample, plain.reward = True, {"a": 0.5, "b": 2.0}
    batch = TrainBatch.from_samples([[plain, gone]], "b")
    assert batch.step_rewards is not None
    assert batch.step_rewards.tolist() == [0, 0, 0, 0, 2.0, 0, 0, 0, 0, 0]
    assert batch.step_rewards.dtype == np.float64
    assert TrainBatch.from_samples([[played(range(1, 3))]]).step_rewards is None
    only = TrainBatch.from_samples([[played(range(1, 3), step_credit=[0.5, 0.5])]])
    assert only.step_rewards is not None
    for broken in (math.nan, "1", True):
        with pytest.raises(SampleError, match="index=41: step_credit of turn 2 must be a finite number"):
            TrainBatch.from_samples([[played(range(1, 3), step_credit=[0.5, broken])]])


def test_states_are_what_was_shown_before_a_turn() -> None:
    def states(*groups: list[Sample]) -> list[list[int]]:
        batch = TrainBatch.from_samples(groups)
        return [turn_values_at(batch.observation_ids[batch.response_slice(i)].tolist()) for i in range(len(batch))]

    def turn_values_at(values: list[int]) -> list[int]:
        assert values[0::3] == values[1::3]
        return values[0::3]

    same, other, later = played(range(1, 4)), played(range(1, 4), shown=8), played(range(4, 6))
    assert states([same, other, later], [same]) == [[0, 1, 1], [0, 2, 2], [3, 1], [4, 5, 5]]
    plain = Sample(tokens=[1, 2, 3], response_length=2, reward=0.5, rollout_log_probs=[-1.0, -2.0])
    assert TrainBatch.from_samples([[plain]]).observation_ids.tolist() == [-1, -1]
    interrupted = Sample(reward=1.0)
    interrupted.set_prompt_tokens([1])
    interrupted.append_model([5, 6, 7], [-1.0] * 3, [("1", 0, 1), ("2", 1, 3)], turn=1)
    assert TrainBatch.from_samples([[interrupted]]).observation_ids.tolist() == [0, 0, 0]


def test_six_turns_of_which_one_decides_from_samples_to_advantages() -> None:
    rewards = [[None, None, float(right), None, None, None] for right in (True, False)]
    group = [played(range(1, 7), math.fsum(r or 0 for r in given), step_rewards=given) for given in rewards]
    batch = TrainBatch.from_samples([group])
    settings = AlgorithmSettings(turn_credit="returns", gamma=0.5, grpo_std_normalization=False)
    found = estimate(batch, algorithm_of(settings))
    first, second = found.advantages.split(17)
    per_turn = [0.125, 0.25, 0.5, 0.0, 0.0, 0.0]
    assert (first[0::3].tolist(), second[0::3].tolist()) == (per_turn, [-one for one in per_turn])
    gigpo = estimate(batch, algorithm_of(settings.model_copy(update={"turn_credit": "gigpo"}))).advantages
    # Turns 2 to 6 answer the same token: returns of .5, 1 and eight zeros have the mean .15.
    assert gigpo[0::3][:6].tolist() == pytest.approx([0.5 + one for one in (0.125, 0.35, 0.85, -0.15, -0.15, -0.15)])


# ---- weights of the user ----------------------------------------------------------------------------------------------


def test_weights_multiply_and_zero_masks() -> None:
    weighed, plain = played(range(1, 4)), played(range(1, 2))
    weighed.train_metadata = {"weight": 0.5, "turn_weights": [1, 0, 3.0], "mine": "kept"}
    batch = TrainBatch.from_samples([[weighed, plain]])
    assert batch.loss_weights is not None
    assert batch.loss_weights.tolist() == [0.5, 0.5, 0.5, 0, 0, 0, 1.5, 1.5, 1, 1]
    assert batch.loss_mask.tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 1, 1]
    assert batch.select([1]).loss_weights.tolist() == [1, 1]  # type: ignore[union-attr]
    inputs = one_step(batch, np.arange(2))
    expected = [1 / 16, 1 / 16, 0, 0, 0, 0, 3 / 16, 3 / 16, 1 / 4, 1 / 4]
    assert inputs.weights.tolist() == pytest.approx(expected)
    plain.remove_sample, plain.train_metadata = True, {"turn_weights": []}  # as of a trajectory that failed
    assert TrainBatch.from_samples([[weighed, plain]]).loss_mask.tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 0, 0]
    plain.train_metadata = weighed.train_metadata = {"mine": 1}
    assert TrainBatch.from_samples([[weighed, plain]]).loss_weights is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight": -1}, "weight must be finite and not negative, got -1"),
        ({"weight": math.nan}, "weight must be finite and not negative, got nan"),
        ({"weight": True}, "weight must be finite"),
        ({"turn_weights": [1.0]}, r"turn_weights must have one number for each of 3 turns, got \[1.0\]"),
        ({"turn_weights": None}, "turn_weights must have one number for each of 3 turns, got None"),
        ({"turn_weight": [1, 1, 1]}, "'turn_weight' is not read; write 'turn_weights'"),
        ({"turn_weights": [1, -0.5, 1]}, "turn_weights must be finite and not negative, got -0.5"),
    ],
)
def test_weights_that_are_none(given: dict[str, Any], message: str) -> None:
    sample = played(range(1, 4))
    sample.train_metadata = given
    with pytest.raises(SampleError, match=f"index=41: train_metadata: {message}"):
        TrainBatch.from_samples([[sample]])
