"""From a batch and log-probs to what one optimizer step needs: advantages, weights per token, the loss's view of them.

Advantages are computed over the whole rollout before its first step, so a step may hold part of a group. Weights are computed
over one step's samples, so that a step's loss is their weighted sum in every layout. What the user weighs multiplies them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.algorithm import Algorithm
from agentrl.algorithms.base import AdvantageInputs, Estimate, TokenView, WeightInputs
from agentrl.algorithms.ops.kl import approximate_kl
from agentrl.algorithms.registry import compute_advantages
from agentrl.train.batch import TrainBatch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the loss of one optimizer step reads, over the R response tokens of its `batch` and on the trainer's device.

    Attributes:
        weights: float32 [R], what each token counts.
        total_weight: their sum (1 if that is 0): statistics are means by these weights, whatever their scale.
        per_token: [R] each, by the field names of `TokenView`.
        returns: [R], what a critic is to predict.
    """

    batch: TrainBatch
    algorithm: Algorithm
    weights: Tensor
    total_weight: float
    per_token: Mapping[str, Tensor]
    returns: Tensor | None = None

    def view(
        self,
        response_index: Tensor,
        log_probs: Tensor,
        entropy: Tensor,
        join: Callable[[Tensor], Tensor],
        amend: Any = None,
    ) -> TokenView:
        """The tokens at `response_index` int64 [N], with the model's log-probs and entropies [N] of them. `join` and
        `amend` are those of `TokenView`. Without old log-probs the policy itself is the old one: the ratio is 1 and its
        gradient that of the log-prob."""
        found = {"old_log_probs": log_probs.detach()} | {
            name: array[response_index] for name, array in self.per_token.items()
        }
        found |= {"log_probs": log_probs, "entropy": entropy}
        return TokenView(num_samples=len(self.batch), join=join, amend=amend, **found)


_BATCH_FIELDS = ("rewards", "group_ids", "trajectory_ids", "turns", "step_rewards", "observation_ids")
"""What the batch says in the form in which algorithms read it."""


def estimate(batch: TrainBatch, arrays: Mapping[str, Tensor], algorithm: Algorithm, given: Any = None) -> Estimate:
    """Advantages [R] of a whole rollout's response tokens, returns where a critic learns them, and their metrics.

    `arrays` holds what models computed, flat [R]; the algorithm gets those that it reads. `given` as in `compute_advantages`.
    """
    computed: dict[str, Tensor] = {name: arrays[name] for name in algorithm.reads}
    if algorithm.settings.kl_coef:
        kind = algorithm.settings.kl_loss_type
        computed["kl"] = approximate_kl(arrays["old_log_probs"], arrays["ref_log_probs"], kind)
    said = {name: _tensor(array) for name, array in batch.arrays().items() if name in _BATCH_FIELDS}
    lengths, tokens, mask = _tensor(batch.response_lengths), _tensor(batch.response_tokens), _tensor(batch.loss_mask)
    inputs = AdvantageInputs(lengths=lengths, tokens=tokens, loss_mask=mask.float(), **said, **computed)
    return compute_advantages(inputs, algorithm.settings, given)


def step_inputs(
    batch: TrainBatch, indices: NDArray[np.int64], arrays: Mapping[str, Tensor], algorithm: Algorithm
) -> StepInputs:
    """The samples of one step and what their loss reads, on the device of `arrays`.

    Args:
        batch: the whole rollout.
        indices: the step's samples.
        arrays: flat [R] arrays over the whole rollout, those of `train.contracts.Prepared`; `counted` is the mask that tokens
            are weighed by, if it is not the batch's.
    """
    part, device = batch.select(indices), arrays["advantages"].device
    mask, lengths = _tensor(part.loss_mask), _tensor(part.response_lengths)
    rollouts = _tensor(part.trajectory_ids)
    tokens = torch.from_numpy(batch.response_positions(indices)).to(device)
    chosen = {name: array[tokens] for name, array in arrays.items()}
    counted = chosen.pop("counted", mask).to(mask.device)
    groups = _tensor(part.group_ids)
    inputs = WeightInputs(loss_mask=counted, lengths=lengths, trajectory_ids=rollouts, group_ids=groups)
    weights = algorithm.token_weights(inputs) * mask
    if part.loss_weights is not None:
        weights = weights * _tensor(part.loss_weights)
    total_weight = weights.sum().item() or 1.0
    known = {
        "loss_mask": mask,
        "sample_ids": torch.arange(len(part)).repeat_interleave(lengths),
        "turn_ids": _tensor(part.turns).long(),
        "trajectory_ids": rollouts.repeat_interleave(lengths),
        "staleness": _tensor(part.staleness),
    }
    chosen |= {name: array.to(device) for name, array in known.items()}
    returns = chosen.pop("returns", None)
    return StepInputs(part, algorithm, weights.float().to(device), total_weight, chosen, returns)


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array.copy())
