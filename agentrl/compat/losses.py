"""slime's functions inside a loss: importance weights, reducers and whole losses, with whole samples on every rank.

1. Parts of a sample on context-parallel ranks are joined before a function gets them, and each rank takes its part of
   the result. Gradients take the same path. So slime's helpers for split samples do nothing here.
2. Logits cover the whole vocabulary. Rows that predict prompt tokens are 0, because they are not computed.
3. `sum_of_sample_mean` sums with the token weights of the run's settings, times the divisor that slime applies
   afterwards. With `--loss-denominator all` it is slime's.
4. A `RolloutBatch` is a dict of lists with one entry per sample, under slime's keys. Per-token entries are float32
   tensors over the response (`loss_masks`: int32). Log-probs and values are 0 where a token does not train. `rewards`
   are as slime's trainer sees them: with an estimator that compares within groups, relative to the group."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.algorithm import Algorithm
from agentrl.algorithms.base import TokenView, need
from agentrl.algorithms.group_relative import GroupRelative
from agentrl.errors import PluginError, TrainError
from agentrl.train.batch import TrainBatch
from agentrl.train.microbatches import MicrobatchTensors
from agentrl.train.objective import StepInputs

Lists = list[Tensor]
RolloutBatch = dict[str, Any]

_SAME = ("ref_log_probs", "rollout_log_probs", "teacher_log_probs", "values", "advantages", "returns")
PER_TOKEN = {"log_probs": "old_log_probs", **dict(zip(_SAME, _SAME, strict=True))}
"""slime's names of per-token arrays, and ours."""


def rollout_batch(batch: TrainBatch, device: torch.device, algorithm: Algorithm | None = None) -> RolloutBatch:
    """Return the samples of `batch`, with the arrays that were computed for them."""
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
    """Return the samples as slime's losses get them: with all keys, and `tokens` as one sequence [1, T]."""
    absent = dict.fromkeys((*PER_TOKEN, "multimodal_train_inputs", "packed_seq_params"))
    found = rollout_batch(batch, device)
    return {**absent, **found, "tokens": torch.cat(found["unconcat_tokens"])[None]}


def flat(data: Mapping[str, Any], key: str, what: str) -> Tensor:
    """Return a key's entries, joined to [R]. Raises PluginError: a sample has no tensor of its response's length."""
    parts = [torch.as_tensor(entry) for entry in data.get(key) or ()]
    if (shapes := [list(part.shape) for part in parts]) != (want := [[n] for n in data["response_lengths"]]):
        shaped = f"expected tensors of the shapes {want!s:.80}, got {shapes!s:.80}"
        raise PluginError(f'{what}: rollout_data["{key}"]: {shaped}')
    return torch.cat(parts)


class Whole:
    """The response tokens of a microbatch's samples, concatenated: [n], of which this rank computed [N]."""

    def __init__(self, step: StepInputs, mb: MicrobatchTensors, args: Any) -> None:
        self.step, self.index, self.batch = step, mb.response_index, step.batch.select(mb.samples)
        self.positions = torch.from_numpy(step.batch.response_positions(mb.samples)).to(self.index.device)
        order = torch.empty_like(step.weights, dtype=torch.int64)
        order[self.positions] = torch.arange(len(self.positions), device=order.device)
        self.places, self.lengths = order[self.index], self.batch.response_lengths.tolist()
        trajectories = len(np.unique(step.batch.trajectory_ids))
        self.divisor = int(step.batch.loss_mask.sum()) or 1 if args.calculate_per_token_loss else trajectories
        """The divisor of a step's sum in slime."""

    def join(self, own: Tensor, places: Tensor | None = None, size: int | None = None) -> Tensor:
        """Join the ranks' [N, ...] to [n, ...] (or to `places` of `size`), 0 where no rank has it; differentiable."""
        found = own.new_zeros(len(self.positions) if size is None else size, *own.shape[1:])
        return self.step.ranks.add_up(found.index_copy(0, self.places if places is None else places, own))

    def split(self, values: Tensor) -> Lists:
        """Split [n] into one tensor per sample."""
        return list(values.split(self.lengths))


def own_loss(
    function: Callable[..., Any], args: Any, step: StepInputs, mb: MicrobatchTensors, logits: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    if step.batch.support_ids is not None:
        raise TrainError("slime-style losses do not support top-p or top-k; set top-p 1 and no top-k")
    whole = Whole(step, mb, args)
    ends = zip(whole.batch.offsets[1:].tolist(), whole.lengths, strict=True)
    rows = torch.cat([torch.arange(end - n - 1, end - 1, device=logits.device) for end, n in ends])
    packed = whole.join(logits, rows[whole.places], len(whole.batch.tokens))[None]
    weights, count = step.weights[whole.positions], whole.divisor
    data = microbatch(whole.batch, whole.index.device)
    loss, stats = function(args, data, packed, lambda values: (values * weights).sum() * count)
    return loss / count, {name: torch.as_tensor(value).detach().double() / count for name, value in stats.items()}


def amended(
    tis: Callable[..., Any] | None,
    reducer: Callable[..., Any] | None,
    args: Any,
    step: StepInputs,
    mb: MicrobatchTensors,
    view: TokenView,
    loss: Tensor,
) -> tuple[Tensor, TokenView, Mapping[str, Tensor]]:
    whole, stats = Whole(step, mb, args), {}
    masks = whole.split(step.per_token["loss_mask"][whole.positions].int())
    lengths = {"total_lengths": whole.batch.lengths.tolist(), "response_lengths": whole.lengths}
    if tis is not None:
        names = ("old_log_probs", "rollout_log_probs")
        old, rollout = (whole.split(whole.join(need(getattr(view, n), n, "use_tis").detach())) for n in names)
        logs = {"train_log_probs": old, "rollout_log_probs": rollout}
        joined, masks, found = tis(args=args, pg_loss=whole.join(loss), loss_masks=masks, **logs, **lengths)
        kept = torch.cat(masks)[whole.places]
        loss, stats = joined[whole.places] * kept, {name: found[name].detach()[whole.places] for name in found}
        view = replace(view, loss_mask=view.loss_mask * (kept != 0))
    if reducer is not None:
        loss = loss * _factors(reducer(*lengths.values(), masks, args.calculate_per_token_loss), whole, loss)
    return loss, view, stats


def _factors(reducer: Callable[[Tensor], Tensor], whole: Whole, loss: Tensor) -> Tensor:
    """Return each token's weight [N] in the policy term by slime's reducer, divided by its weight by the settings."""
    step, values = whole.step, whole.join(loss.detach()).requires_grad_()
    total = reducer(values)
    (slopes,) = torch.autograd.grad(total, values)
    if not torch.allclose(total, (slopes * values).sum(), rtol=1e-4, atol=1e-6):
        why = "the reducer is no weighted sum of the tokens' losses"
        raise PluginError(f"--custom-pg-loss-reducer-function-path: {why}")
    weights, given = step.weights[whole.index], step.batch.loss_weights
    users = 1 if given is None else torch.from_numpy(given.copy()).to(loss.device)[whole.index]
    return torch.where(weights > 0, slopes[whole.places] / whole.divisor * users / weights, 0.0)


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """Return `tensor`, because samples are whole already. It also replaces slime's inverse of this function."""
    return tensor


def get_responses(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    apply_temperature: bool = True,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each sample the logits [response, vocabulary] of its response, over temperature, and its tokens."""
    scaled = logits[0] / args.rollout_temperature if apply_temperature else logits[0]
    for part, tokens, n in zip(scaled.split(list(total_lengths)), unconcat_tokens, response_lengths, strict=True):
        yield part[len(part) - n - 1 : -1], tokens[len(tokens) - n :]


def get_log_probs_and_entropy(
    logits: Tensor, *, with_entropy: bool = False, non_loss_data: bool = True, **where: Any
) -> tuple[Tensor, dict[str, Lists]]:
    """Return log-probs (and entropies) of the response tokens, one tensor per sample. `where`: see `get_responses`."""
    logs = [(part.log_softmax(-1), tokens) for part, tokens in get_responses(logits, **where)]
    found = {"log_probs": [part.gather(-1, tokens[:, None])[:, 0] for part, tokens in logs]}
    if with_entropy:
        found["entropy"] = [-(part.exp() * part).sum(-1) for part, _ in logs]
    return logits.new_empty(0), found
