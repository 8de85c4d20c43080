"""`ForwardBackward`: log-probs, the loss of a step and its statistics, from a model's outputs for each microbatch. The
loss of a step is `sum(weight * token loss)` over the whole step, with weights computed before it. Gradients are sums
over microbatches, data-parallel ranks and context-parallel ranks. No backend divides them, under any layout."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.base import TokenLoss
from agentrl.algorithms.ops.corrections import mismatch_sums
from agentrl.lora import LoraShape
from agentrl.numerics.batch_invariant import batch_invariant
from agentrl.train.batch import TrainBatch
from agentrl.train.hooks import NO_HOOKS, TrainHooks
from agentrl.train.logprobs import SamplingSupport, token_log_probs
from agentrl.train.microbatches import MicrobatchTensors, OutputPositions, Packer
from agentrl.train.objective import StepInputs
from agentrl.train.packing import PackingPlan
from agentrl.train.settings import TrainSettings

OnOutput = Callable[[Tensor, MicrobatchTensors], Any]
"""Takes a model's output at the rows of a microbatch: [n, vocabulary of this rank], or [n, 1] for a critic."""
Learned = tuple[Tensor, dict[str, Tensor]]  # a microbatch's loss, to be differentiated, and the sums of its statistics


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The context that all models of a process share."""

    settings: TrainSettings
    ranks: Any  # the backend's subclass of `Ranks`
    device: torch.device
    temperature: float
    hooks: TrainHooks
    network: Any  # the backend's subclass of `Network`

    @property
    def lora(self) -> LoraShape | None:
        """Return the shape of the adapters that learn instead of the weights; None without LoRA."""
        return lora_of(self.settings)


def lora_of(settings: TrainSettings) -> LoraShape | None:
    """Return the shape of the adapters that the settings name; None without LoRA."""
    s = settings
    return None if s.lora_rank is None else LoraShape(s.lora_rank, s.lora_alpha, s.target_modules)


@dataclass(slots=True, kw_only=True)
class ForwardBackward(ABC):
    """The passes of one model. `mixture`: whether each layer has experts, number of experts, experts per token.
    `vocab_group`: the ranks over which the vocabulary is sharded."""

    model: Any
    place: ModelContext
    packer: Packer
    mixture: tuple[Sequence[Any], int, int]
    vocab: int
    vocab_group: dist.ProcessGroup | None = None

    @abstractmethod
    def run(
        self, batch: TrainBatch, plan: PackingPlan, rows: OutputPositions, on_output: OnOutput, *, learns: bool
    ) -> list[Any]:
        """Run the model over this rank's microbatches; returns the results of `on_output` on ranks with the last layer.
        If it `learns`, `on_output` returns `Learned`. Gradients are summed over all ranks; statistics are returned."""

    def whole(self, logits: Tensor) -> Tensor:
        """Return logits [n, vocabulary] from this rank's shard of the vocabulary."""
        return logits

    def from_end(self, found: Any) -> Any:
        """Return the value that the last stage of the pipeline has, on all stages."""
        return found

    @torch.no_grad()
    def log_probs(self, batch: TrainBatch, plan: PackingPlan, rows: OutputPositions) -> NDArray[np.float32]:
        """Return log-probs [R] of the response tokens, 0 for tokens that `rows` leaves out, on every rank."""

        def score(logits: Tensor, mb: MicrobatchTensors) -> tuple[Tensor, Tensor]:
            return mb.response_index, self._score(logits, mb, batch)[0]

        return self._everywhere(batch, self.run(batch, plan, rows, score, learns=False))

    @torch.no_grad()
    def values(self, batch: TrainBatch, plan: PackingPlan) -> NDArray[np.float32]:
        """Return a critic's values [R] before each trained token, 0 for other tokens, on every rank."""
        found = self.run(batch, plan, "trained", lambda out, mb: (mb.response_index, out[:, 0]), learns=False)
        return self._everywhere(batch, found)

    def _everywhere(self, batch: TrainBatch, pairs: list[tuple[Tensor, Tensor]]) -> NDArray[np.float32]:
        out = torch.zeros(len(batch.loss_mask), dtype=torch.float32, device=self.place.device)
        for response_index, found in pairs:
            out[response_index] = found
        dist.all_reduce(out, group=self.place.ranks.dp_cp_group)
        whole: NDArray[np.float32] = self.from_end(out.cpu().numpy())
        return whole

    def gradients(self, plan: PackingPlan, inputs: StepInputs) -> tuple[dict[str, float], NDArray[np.float32]]:
        """Add the gradients of one step to the model's. Returns, on every rank, the loss with its weighted statistics,
        and the log-probs [R] from the forward pass, 0 for tokens without an output."""
        batch, algorithm = inputs.batch, inputs.algorithm
        seen: list[tuple[Tensor, Tensor]] = []

        def loss(logits: Tensor, mb: MicrobatchTensors) -> Learned:
            log_probs, entropy = self._score(logits, mb, batch)
            seen.append((mb.response_index, log_probs.detach()))
            amended = self.place.hooks.amend(inputs, mb) if mb.samples else None
            view = inputs.view(mb.response_index, log_probs, entropy, amended)
            if self.place.hooks.takes_logits and not mb.samples:  # padding of a rank with too few samples
                loss, sums = logits.sum() * 0.0, {"loss": logits.new_zeros((), dtype=torch.float64)}
            elif self.place.hooks.takes_logits:
                loss, sums = self._hooked(inputs, mb, logits)
            else:
                loss, sums = _weighted(algorithm.token_loss(view), inputs, mb.response_index)
            sums["computed_tokens"] = loss.new_tensor(mb.computed / self.place.ranks.cp, dtype=torch.float64)
            if view.rollout_log_probs is not None:
                sums |= mismatch_sums(view, engine_is_old=bool(algorithm.settings.use_rollout_logprobs))
            return loss, sums

        rows: OutputPositions = "response" if self.place.hooks.takes_logits else "trained"
        totals = self._reduce(self.run(batch, plan, rows, loss, learns=True))
        computed = totals.pop("computed_tokens")
        shares = {"computed_tokens_share": computed, "copied_tokens_share": computed - plan.distinct}
        return totals | {name: tokens / plan.tokens for name, tokens in shares.items()}, self._everywhere(batch, seen)

    def value_gradients(self, plan: PackingPlan, inputs: StepInputs) -> dict[str, float]:
        """Add the gradients of a critic's loss to the model's; returns the loss and its weighted statistics."""
        old, returns = inputs.per_token["values"], inputs.per_token["returns"]

        def loss(out: Tensor, mb: MicrobatchTensors) -> Learned:
            found = inputs.algorithm.value_loss(out[:, 0], old[mb.response_index], returns[mb.response_index])
            return _weighted(found, inputs, mb.response_index)

        return self._reduce(self.run(inputs.batch, plan, "trained", loss, learns=True))

    def batch_invariant(self) -> AbstractContextManager[None]:
        """Return a context that computes with `agentrl.numerics.batch_invariant` if `true_on_policy_mode` is set."""
        return batch_invariant(self.place.settings.true_on_policy_mode)

    def _score(self, logits: Tensor, mb: MicrobatchTensors, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        kept = None
        if batch.support_ids is not None and (sets := batch.sampling_support(mb.response_index.cpu().numpy())):
            kept = SamplingSupport(torch.from_numpy(sets[0]).to(logits.device, torch.int64), torch.from_numpy(sets[1]))
        chosen: dict[str, Any] = {"group": self.vocab_group, "temperature": self.place.temperature, "kept": kept}
        with self.batch_invariant():
            return token_log_probs(logits, mb.targets, vocab=self.vocab, **chosen)

    def _hooked(self, inputs: StepInputs, mb: MicrobatchTensors, logits: Tensor) -> Learned:
        """Return `Learned` of a hook's loss. Every context-parallel rank computes all of it, so each takes a share."""
        loss, stats = self.place.hooks.loss(inputs, mb, self.whole(logits)[:, : self.vocab].float())
        share = loss / self.place.ranks.cp
        sums = {name: value / self.place.ranks.cp for name, value in stats.items()} | {"loss": share.detach().double()}
        return share, sums

    def _reduce(self, found: list[Mapping[str, Tensor]]) -> dict[str, float]:
        totals: dict[str, float] = {}
        if found:  # true on the ranks with the last layer: each has at least one microbatch
            zero = torch.zeros((), dtype=torch.float64, device=self.place.device)
            names = sorted({name for sums in found for name in sums})
            if self.place.hooks is not NO_HOOKS:  # a rank with padding alone has called none, and lacks its names
                every: list[list[str]] = [[]] * dist.get_world_size(self.place.ranks.dp_cp_group)
                dist.all_gather_object(every, names, group=self.place.ranks.dp_cp_group)
                names = sorted(set().union(*every))
            vector = torch.stack([sum((sums[name] for sums in found if name in sums), zero) for name in names])
            dist.all_reduce(vector, group=self.place.ranks.dp_cp_group)
            totals = dict(zip(names, vector.tolist(), strict=True))
        everywhere: dict[str, float] = self.from_end(totals)
        return everywhere


def _weighted(found: TokenLoss, inputs: StepInputs, response_index: Tensor) -> Learned:
    """Return the weighted sum of the losses of the tokens at `response_index`, and the sums of their statistics."""
    weights = inputs.weights[response_index]
    loss, means = (found.loss * weights).sum(), weights / (inputs.total_weight or 1.0)
    stats = found.stats if inputs.total_weight else {}  # a mean over no tokens is left out, not 0
    sums = {name: (value.double() * means).sum() for name, value in stats.items()}
    sums["loss"] = loss.detach().double()
    return loss, sums
