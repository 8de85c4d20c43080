"""From a batch and log-probs to what one optimizer step needs: advantages and weights per token.

1. Advantages are computed over the whole rollout before its first step, so a step may hold part of a group.
2. Weights are computed over one step's samples, so that a step's loss is their weighted sum in every layout.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.advantages import AdvantageInputs, compute_advantages
from agentrl.algorithms.aggregation import token_weights
from agentrl.algorithms.kl import approximate_kl
from agentrl.algorithms.settings import AlgorithmSettings
from agentrl.train.batch import TrainBatch
from agentrl.train.megatron.step import StepInputs


def advantages(batch: TrainBatch, arrays: Mapping[str, Tensor], algorithm: AlgorithmSettings) -> Tensor:
    """Advantages, float32 [R], of a whole rollout's response tokens.

    `arrays` holds flat [R] log-probs; with `kl_coef`, `old_log_probs` and `ref_log_probs` are read from it.
    """
    kl = None
    if algorithm.kl_coef:
        kl = approximate_kl(arrays["old_log_probs"], arrays["ref_log_probs"], algorithm.kl_loss_type)
    inputs = AdvantageInputs(
        rewards=_tensor(batch.rewards),
        group_ids=_tensor(batch.group_ids),
        rollout_ids=_tensor(batch.rollout_ids),
        lengths=_tensor(batch.response_lengths),
        loss_mask=_tensor(batch.loss_mask).float(),
        kl=kl,
    )
    return compute_advantages(inputs, algorithm).float()


def step_inputs(
    batch: TrainBatch, indices: NDArray[np.int64], arrays: Mapping[str, Tensor], algorithm: AlgorithmSettings
) -> tuple[TrainBatch, StepInputs]:
    """The samples of one step and their per-token arrays, on the device of `arrays`.

    Args:
        batch: the whole rollout.
        indices: the step's samples.
        arrays: flat [R] arrays over the whole rollout, by the field names of `StepInputs`.
    """
    part = batch.select(indices)
    tokens = torch.from_numpy(np.concatenate([np.r_[batch.response_slice(i)] for i in indices.tolist()]))
    weights = token_weights(
        _tensor(part.loss_mask),
        _tensor(part.response_lengths),
        _tensor(part.rollout_ids),
        per_token=algorithm.calculate_per_token_loss,
    ).float()
    names = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")
    chosen = {name: arrays[name][tokens.to(arrays[name].device)] for name in names if name in arrays}
    return part, StepInputs(weights, *(chosen.get(name) for name in names))


def _tensor(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array.copy())
