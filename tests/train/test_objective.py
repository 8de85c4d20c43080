"""The inputs of algorithms: whole rollouts for advantages, one step's tokens with their ids for the loss."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algorithms import AlgorithmSettings, SampleView, algorithm_of
from agentrl.algorithms.base import need
from agentrl.train.batch import TrainBatch
from agentrl.train.objective import StepInputs, estimate, step_inputs
from agentrl.train.ranks import Ranks
from tests.train.test_batch import make_sample


def credit(inputs: SampleView, settings: AlgorithmSettings) -> torch.Tensor:
    """Return everything that an estimator may read, as one number for each token."""
    read = {name: need(getattr(inputs, name), name, "credit") for name in ("tokens", "turns", "step_rewards", "kl")}
    return read["tokens"] + 100 * read["turns"] + read["step_rewards"] + 1000 * read["kl"]


def one_step(whole: TrainBatch, indices: NDArray[np.int64]) -> StepInputs:
    """Return the inputs of a GRPO step on the CPU."""
    group: Any = None  # with one rank nothing is joined
    groups = {"dp_cp_group": group, "cp_group": group, "owns_default_group": False, "before": frozenset()}
    ranks = Ranks(rank=0, world=1, dp=1, dp_rank=0, **groups)
    return step_inputs(whole, indices, algorithm_of(AlgorithmSettings()), ranks, torch.device("cpu"))


def batch() -> TrainBatch:
    fanned_out = [make_sample(0, rollout_id=3), make_sample(1, model=1, observed=2, rollout_id=3)]
    return TrainBatch.from_samples([[*fanned_out, make_sample(2)]], trained=12)


def test_estimators_see_tokens_turns_step_rewards_and_kl() -> None:
    settings = AlgorithmSettings(advantage_estimator=f"{__name__}:credit", kl_coef=0.5, kl_loss_type="k1")
    old, ref = np.zeros(12, np.float32), np.full(12, 2.0, np.float32)
    got = estimate(replace(batch(), old_log_probs=old, ref_log_probs=ref), algorithm_of(settings)).advantages
    one = [110.0, 111.5, 107.0, 220.5]
    assert (got + 2000).tolist() == [*one, 110.5, 107.0, 107.0, 220.5, *one]


def test_a_view_tells_samples_turns_trajectories_and_staleness_apart() -> None:
    numbers = np.arange(12, dtype=np.float32)
    inputs = one_step(replace(batch(), advantages=numbers, rollout_log_probs=-numbers), np.array([2, 1]))
    flat, log_probs = torch.tensor([3, 0, 4, 7, 1]), torch.full((5,), -0.5, requires_grad=True)
    seen = inputs.view(flat, log_probs, torch.ones(5))
    assert inputs.batch.sample_indices.tolist() == [2, 1]
    assert (seen.num_samples, seen.sample_ids.tolist()) == (2, [0, 0, 1, 1, 0])
    assert seen.trajectory_ids.tolist() == [1, 1, 0, 0, 1]
    assert seen.turn_ids.tolist() == [2, 1, 1, 2, 1]
    assert seen.staleness.tolist() == [0, 5, 5, 0, 5]
    assert seen.advantages is not None
    assert seen.advantages.tolist() == [11, 8, 4, 7, 9]
    assert seen.rollout_log_probs is not None
    assert seen.rollout_log_probs.tolist() == [-11, -8, -4, -7, -9]
    assert seen.old_log_probs is not None
    assert seen.old_log_probs.tolist() == log_probs.tolist()
    assert not seen.old_log_probs.requires_grad
