"""slime's `RolloutBatch`: a dict of lists with one entry a sample, made of a `TrainBatch` and what was computed of it.

1. Keys and types are slime's. Per-token entries are float32 tensors over the response (`loss_masks`: int32), on the
   trainer's device. Log-probs and values are 0 where a token does not train.
2. `rewards` are as slime's trainer sees them: with an estimator that compares within groups, relative to the group.
"""

from collections.abc import Mapping
from typing import Any

import orjson
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.algorithm import Algorithm
from agentrl.algorithms.group_relative import GroupRelative
from agentrl.errors import PluginError
from agentrl.train.batch import TrainBatch

RolloutBatch = dict[str, Any]

_SAME = ("ref_log_probs", "rollout_log_probs", "teacher_log_probs", "values", "advantages", "returns")
PER_TOKEN = {"log_probs": "old_log_probs", **dict(zip(_SAME, _SAME, strict=True))}
"""slime's names of per-token arrays, and ours."""


def rollout_batch(batch: TrainBatch, device: torch.device, algorithm: Algorithm | None = None) -> RolloutBatch:
    """The samples of `batch`, with what was computed of them."""
    response, arrays = batch.response_lengths.tolist(), batch.arrays()

    def there(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.copy()).to(device)

    rewards, groups, rollouts = map(there, (batch.rewards, batch.group_ids, batch.trajectory_ids))
    compared = algorithm.compare(rewards, groups, rollouts) if isinstance(algorithm, GroupRelative) else rewards
    masks, member = there(batch.loss_mask).int().split(response), rollouts.unique(return_inverse=True)[1]
    trained = torch.stack([mask.sum() for mask in masks]).float()
    sums = torch.zeros(len(batch), device=device).index_add(0, member, trained)
    found: RolloutBatch = {
        "tokens": list(there(batch.tokens).long().split(batch.lengths.tolist())),
        "total_lengths": batch.lengths.tolist(),
        "response_lengths": response,
        "loss_masks": list(masks),
        "rewards": compared.tolist(),
        "raw_reward": rewards.tolist(),
        "sample_indices": batch.sample_indices.tolist(),
        "group_indices": batch.group_indices.tolist(),
        "rollout_ids": rollouts.tolist(),
        "rollout_mask_sums": sums[member],
    }
    found["unconcat_tokens"] = list(found["tokens"])
    found |= {key: list(there(arrays[ours]).split(response)) for key, ours in PER_TOKEN.items() if ours in arrays}
    if batch.metadata is not None:
        found["metadata"] = [orjson.loads(text) for text in batch.metadata.tolist()]
    return found


def microbatch(batch: TrainBatch, device: torch.device) -> RolloutBatch:
    """As slime's losses get the samples: all of their keys are there, and `tokens` are one sequence [1, T]."""
    absent = dict.fromkeys((*PER_TOKEN, "multimodal_train_inputs", "packed_seq_params"))
    found = rollout_batch(batch, device)
    return {**absent, **found, "tokens": torch.cat(found["unconcat_tokens"])[None]}


def flat(data: Mapping[str, Any], key: str, what: str) -> Tensor:
    """The entries of a key one after the other, [R]. Raises PluginError: there is not a tensor of its response's length
    for each sample."""
    parts = [torch.as_tensor(entry) for entry in data.get(key) or ()]
    if (shapes := [list(part.shape) for part in parts]) != (want := [[n] for n in data["response_lengths"]]):
        shaped = f"expected tensors of the shapes {want!s:.80}, got {shapes!s:.80}"
        raise PluginError(f'{what}: rollout_data["{key}"]: {shaped}')
    return torch.cat(parts)
