"""Inputs of one optimizer step, from a batch and log-probs: advantages, token weights, and the views of losses.
Advantages are computed over the whole rollout before its first step, so a step may hold part of a group. Weights are
computed over the samples of one step. The step's loss is therefore the weighted sum of its tokens' losses in every
parallel layout. The user's own factors (`loss_weights`) multiply the weights."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.algorithm import Algorithm
from agentrl.algorithms.base import Amend, Estimate, SampleView, TokenView, need
from agentrl.algorithms.ops.kl import approximate_kl
from agentrl.algorithms.registry import compute_advantages
from agentrl.train.batch import TrainBatch
from agentrl.train.ranks import Ranks

_FROM_MODELS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "teacher_log_probs", "values")
COMPUTED = (*_FROM_MODELS, "advantages", "chosen", "returns")  # computed fields that losses read, if there are any
_SAME = {f.name for f in fields(SampleView)} & {f.name for f in fields(TrainBatch)} - {"loss_mask", "tokens"}
"""The fields that `SampleView` takes unchanged from `TrainBatch`."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of the loss of one optimizer step: the samples of `batch`, and device arrays for R response tokens."""

    batch: TrainBatch
    algorithm: Algorithm
    ranks: Ranks
    weights: Tensor  # float32 [R], each token's weight in the loss
    total_weight: float  # sum of `weights`. Statistics are weighted sums divided by it; there are none if it is 0
    per_token: Mapping[str, Tensor]  # field of `TokenView` -> its values [R]; a critic's targets are `returns`

    def view(self, response_index: Tensor, log_probs: Tensor, entropy: Tensor, amend: Amend | None = None) -> TokenView:
        """Return the tokens at `response_index` int64 [N] with the model's `log_probs` and `entropy` [N]; `amend` as in
        `TokenView`. Without old log-probs, `log_probs` without gradient replace them, so the ratio is 1."""
        found = {name: array[response_index] for name, array in self.per_token.items() if name != "returns"}
        found = {"old_log_probs": log_probs.detach(), **found, "log_probs": log_probs, "entropy": entropy}
        return TokenView(num_samples=len(self.batch), join=self.ranks.add_up, amend=amend, **found)


def sample_view(batch: TrainBatch, algorithm: Algorithm, mask: NDArray[np.uint8]) -> SampleView:
    """Return the algorithm's view of the batch with this mask and with the computed fields that it `reads`."""
    names = _SAME - (set(COMPUTED) - algorithm.reads)
    found = {name: tensor_of(array) for name, array in batch.arrays().items() if name in names}
    tokens, lengths = tensor_of(batch.response_tokens), tensor_of(batch.response_lengths)
    return SampleView(lengths=lengths, tokens=tokens, loss_mask=tensor_of(mask).float(), **found)


def estimate(batch: TrainBatch, algorithm: Algorithm, given: tuple[Tensor, Tensor] | None = None) -> Estimate:
    """Return advantages [R] of a whole rollout, a critic's returns, and metrics; `given`: see `compute_advantages`."""
    seen, settings = sample_view(batch, algorithm, batch.loss_mask), algorithm.settings
    if settings.kl_coef:
        old, reference = (need(getattr(seen, name), name, "kl_coef") for name in ("old_log_probs", "ref_log_probs"))
        seen = replace(seen, kl=approximate_kl(old, reference, settings.kl_loss_type))
    return compute_advantages(seen, settings, given)


def step_inputs(
    whole: TrainBatch, indices: NDArray[np.int64], algorithm: Algorithm, ranks: Ranks, device: torch.device
) -> StepInputs:
    """Return the inputs of one step on `device`, for the samples at `indices` of the `whole` rollout."""
    batch = whole.select(indices)
    mask, lengths = tensor_of(batch.loss_mask), tensor_of(batch.response_lengths)
    counted = batch.loss_mask if batch.counted is None else batch.counted
    weights = algorithm.token_weights(sample_view(batch, algorithm, counted)) * mask
    if batch.loss_weights is not None:
        weights = weights * tensor_of(batch.loss_weights)
    total_weight = weights.sum().item()
    known = {
        "loss_mask": mask,
        "sample_ids": torch.arange(len(batch)).repeat_interleave(lengths),
        "turn_ids": tensor_of(batch.turns).long(),
        "trajectory_ids": tensor_of(batch.trajectory_ids).repeat_interleave(lengths),
        "staleness": tensor_of(batch.staleness).long(),
    }
    known |= {name: tensor_of(array) for name, array in batch.arrays().items() if name in COMPUTED}
    there = {name: tensor.to(device) for name, tensor in known.items()}
    return StepInputs(batch, algorithm, ranks, weights.float().to(device), total_weight, there)


def tensor_of(array: NDArray[Any]) -> Tensor:
    """Return a tensor with a copy of the array's values."""
    return torch.from_numpy(array.copy())
