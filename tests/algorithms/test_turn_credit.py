"""Turn advantages: against numbers by hand and, if both must agree, plain GRPO; the algorithms that support them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.algorithms import AlgorithmSettings, SampleView, compute_advantages
from agentrl.errors import TrainError

TakesTurns = ["grpo", "cispo", "rloo", "reinforce_plus_plus_baseline"]
Played = Sequence[tuple[int, float]]
"""A trajectory: for each turn its state (the observation before it) and its reward."""


def inputs(groups: Sequence[Sequence[Played]], *, steps: bool = True, numbers: Sequence[int] = ()) -> SampleView:
    """Make turns of two tokens, each but the last with one observation token. `numbers`: numbers of first turns."""
    trajectories = [played for group in groups for played in group]
    starts = numbers or [1] * len(trajectories)
    mask, turns, states, rewards = [], [], [], []
    for played, start in zip(trajectories, starts, strict=True):
        for at, (state, reward) in enumerate(played):
            size = 2 if at == len(played) - 1 else 3
            mask += [1.0, 1.0, 0.0][:size]
            turns += [start + at] * size
            states += [state] * size
            rewards += [0.0, reward, 0.0][:size]
    return SampleView(
        rewards=torch.tensor([math.fsum(r for _, r in played) for played in trajectories], dtype=torch.float64),
        group_ids=torch.tensor([g for g, group in enumerate(groups) for _ in group]),
        trajectory_ids=torch.arange(len(trajectories)),
        lengths=torch.tensor([3 * len(played) - 1 for played in trajectories]),
        loss_mask=torch.tensor(mask),
        turns=torch.tensor(turns, dtype=torch.int32),
        step_rewards=torch.tensor(rewards, dtype=torch.float64) if steps else None,
        observation_ids=torch.tensor(states, dtype=torch.int32),
    )


def credit(batch: SampleView, how: str = "returns", **settings: Any) -> list[list[float]]:
    """Return the advantage of each turn of each sample, which must be the same for all of a turn's tokens."""
    chosen = AlgorithmSettings(turn_credit=how, **{"grpo_std_normalization": False, **settings})
    got = compute_advantages(batch, chosen).advantages.split(batch.lengths.tolist())
    for one in got:
        whole = torch.cat([one, one[-1:]]).reshape(-1, 3)
        assert (whole == whole[:, :1]).all()
    return [one[0::3].tolist() for one in got]


def plain(rewards: Sequence[float], states: Sequence[int] = (0, 1, 2, 3, 4, 5)) -> Played:
    return list(zip(states, rewards, strict=False))


# ---- returns ----------------------------------------------------------------------------------------------------------


def test_six_turns_by_hand() -> None:
    decisive, idle = plain([0, 0, 1, 0, 0, 2]), plain([0, 0, 0, 0, 0, 0])
    got = credit(inputs([[decisive, idle]]), gamma=0.5)
    half = [0.15625, 0.3125, 0.625, 0.25, 0.5, 1.0]  # half of 1 * .5^(3 - t) + 2 * .5^(6 - t)
    assert got == [half, [-value for value in half]]
    std = credit(inputs([[decisive, idle]]), gamma=0.5, grpo_std_normalization=True)
    assert std[0] == pytest.approx([1 / math.sqrt(2)] * 6, rel=1e-4)


def test_after_the_decisive_turn_there_is_nothing_to_tell_trajectories_apart() -> None:
    got = credit(inputs([[plain([0, 1, 0]), plain([0, 0, 0]), plain([0, 0, 0])]]))
    assert got == [pytest.approx([2 / 3, 2 / 3, 0])] + [pytest.approx([-1 / 3, -1 / 3, 0])] * 2


def test_siblings_of_unequal_turns_are_compared_as_far_as_they_went() -> None:
    batch = inputs([[plain([0, 0, 1]), plain([0, 0.5]), plain([0])]])
    assert credit(batch) == [[0.5, 0.25, 0], [0, -0.25], [-0.5]]
    assert credit(batch, rewards_normalization=False, grpo_std_normalization=True) == [[1, 1, 1], [0.5, 0.5], [0]]


def test_groups_are_apart() -> None:
    first, second = [plain([0, 1]), plain([0, 0])], [plain([1, 0]), plain([3, 0])]
    assert credit(inputs([first, second])) == credit(inputs([first])) + credit(inputs([second]))


@pytest.mark.parametrize("estimator", TakesTurns)
@settings(max_examples=30)
@given(
    groups=st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=5), min_size=1, max_size=3),
    turns=st.integers(1, 6),
    steps=st.booleans(),
)
def test_it_is_the_plain_estimator_where_only_the_last_turn_has_a_reward(
    estimator: str, groups: list[list[float]], turns: int, steps: bool
) -> None:
    played = [[plain([0.0] * (turns - 1) + [reward]) for reward in group] for group in groups]
    batch = inputs(played, steps=steps)
    want = compute_advantages(batch, AlgorithmSettings(advantage_estimator=estimator)).advantages
    got = compute_advantages(batch, AlgorithmSettings(advantage_estimator=estimator, turn_credit="returns")).advantages
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_split_trajectory_is_credited_as_a_whole_one() -> None:
    other = plain([1, 0, 0, 2])
    whole = credit(inputs([[plain([1, 0, 0.5, 1]), other]]))
    # The last turn of the earlier sibling includes everything after it, see `turns.credit_of`.
    parts = inputs([[plain([1, 1.5]), plain([0.5, 1]), other]], numbers=[1, 3, 1])
    got = credit(dataclasses.replace(parts, trajectory_ids=torch.tensor([0, 0, 1])))
    assert [got[0] + got[1], got[2]] == whole


def test_masked_samples_are_compared_with_and_those_without_a_reward_are_not() -> None:
    batch = inputs([[plain([0, 1]), plain([0, 0]), plain([4, 4])]])
    batch.loss_mask[5:10] = 0
    batch.rewards[2] = math.nan
    assert credit(batch) == [[0.5, 0.5], [-0.5, -0.5], [0, 0]]
    assert credit(batch, "gigpo") == [[1, 1], [-1, -1], [0, 0]]


def test_the_kl_of_a_turn_is_taken_from_its_reward() -> None:
    batch = inputs([[plain([0, 1]), plain([0, 0])]])
    kl = torch.tensor([1.0, 0, 9, 0, 2, 0, 0, 9, 0, 0])  # 9 marks tokens that the model did not write
    got = credit(dataclasses.replace(batch, kl=kl), kl_coef=0.1)
    assert got == [pytest.approx([0.35, 0.4]), pytest.approx([-0.35, -0.4])]


# ---- gigpo --------------------------------------------------------------------------------------------------------------


def test_turn_groups_by_hand() -> None:
    # State 7 is answered three times, twice by the first trajectory; state 8 once.
    batch = inputs([[[(0, 0), (7, 0), (7, 1)], [(0, 0), (8, 0), (7, 0)]]])
    # Discounted returns are .25, .5, 1 and 0, 0, 0. The turns in state 7 have the mean .5.
    step = [[0.125, 0.0, 0.5], [-0.125, 0.0, -0.5]]
    for weight in (1.0, 0.5):
        got = credit(batch, "gigpo", gamma=0.5, turn_credit_weight=weight)
        want = [[sign * 0.5 + weight * one for one in own] for sign, own in zip((1, -1), step, strict=True)]
        assert got == [pytest.approx(own) for own in want]


def test_states_that_are_alone_or_unknown_leave_the_trajectorys_advantage() -> None:
    batch = inputs([[[(0, 0), (1, 1)], [(2, 0), (3, 0)]], [[(-1, 0), (-1, 1)], [(-1, 0), (-1, 0)]]])
    assert credit(batch, "gigpo") == [[0.5, 0.5], [-0.5, -0.5]] * 2


# ---- who takes it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage_estimator": "gspo"}, "turn_credit returns has no effect with gspo; leave it out"),
        ({"advantage_estimator": "ppo"}, "turn_credit returns has no effect with ppo"),
        ({"advantage_estimator": "reinforce_plus_plus"}, "no effect with reinforce_plus_plus"),
        ({"loss_type": "sft_loss"}, "turn_credit returns has no effect with sft_loss"),
        ({"turn_credit": "none", "gamma": 0.5}, "gamma 0.5 has no effect with grpo"),
        ({"turn_credit_weight": 0.5}, "turn_credit_weight 0.5 has no effect with grpo"),
        ({"lambd": 0.5}, "lambd 0.5 has no effect with grpo"),
    ],
)
def test_who_does_not_take_it(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmSettings(**{"turn_credit": "returns", **settings})


@pytest.mark.parametrize("estimator", TakesTurns)
def test_who_takes_it(estimator: str) -> None:
    AlgorithmSettings(advantage_estimator=estimator, turn_credit="gigpo", gamma=0.9, turn_credit_weight=0.5)


@pytest.mark.parametrize("how", ["returns", "gigpo"])
def test_samples_without_turns_have_no_turn_credit(how: str) -> None:
    batch = inputs([[plain([0, 1]), plain([0, 0])]])
    unknown = dataclasses.replace(batch, turns=torch.zeros(len(batch.loss_mask)))
    with pytest.raises(TrainError, match=r"turn_credit needs to know .*append_model\(\.\.\., turn=1\)"):
        credit(unknown, how)
