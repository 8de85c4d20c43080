"""ForwardBackward over a batch: from what a model says of each microbatch to log-probs, a step's loss and its statistics.

The loss of a step is `sum(weight * token loss)` over the whole step, with weights fixed beforehand. Gradients are plain sums
over microbatches, data-parallel and context-parallel ranks, under every layout: a backend divides by nothing."""

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
from agentrl.train.hooks import TrainHooks
from agentrl.train.logprobs import SamplingSupport, token_log_probs
from agentrl.train.microbatches import MicrobatchTensors, OutputPositions, Packer
from agentrl.train.objective import StepInputs
from agentrl.train.packing import PackingPlan
from agentrl.train.settings import TrainSettings

OnOutput = Callable[[Tensor, MicrobatchTensors], Any]
"""Takes the model's output at a microbatch's rows: [n, vocabulary of this rank], of a critic [n, 1]."""
Learned = tuple[Tensor, dict[str, Tensor]]  # a microbatch's loss, to be differentiated, and the sums of its statistics


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The common context of the models of a process; `network` makes them."""

    settings: TrainSettings
    ranks: Any  # the backend's own `Ranks`
    device: torch.device
    temperature: float
    hooks: TrainHooks
    network: Any  # a class of `Network`s

    @property
    def lora(self) -> LoraShape | None:
        """The adapters that learn in place of the weights."""
        return lora_of(self.settings)


def lora_of(settings: TrainSettings) -> LoraShape | None:
    """Return the adapters that the settings ask for."""
    s = settings
    return None if s.lora_rank is None else LoraShape(s.lora_rank, s.lora_alpha, s.target_modules)


@dataclass(slots=True, kw_only=True)
class ForwardBackward(ABC):
    """Runs one model over batches. `mixture`: for each layer whether it has experts, how many, and how many a token goes to."""

    model: Any
    place: ModelContext
    packer: Packer
    mixture: tuple[Sequence[Any], int, int]
    vocab: int

    @abstractmethod
    def run(
        self, batch: TrainBatch, plan: PackingPlan, rows: OutputPositions, on_output: OnOutput, *, learns: bool
    ) -> list[Any]:
        """Take this rank's microbatches through the model; returns what `on_output` makes of each where the model ends
        here. If it `learns`, `on_output` gives `Learned`: gradients are summed over all ranks into the model's."""

    @property
    def vocab_group(self) -> dist.ProcessGroup | None:
        """The ranks that the vocabulary is cut over."""
        return None

    def whole(self, logits: Tensor) -> Tensor:
        """[n, vocabulary] of this rank's part of it."""
        return logits

    def from_end(self, found: Any) -> Any:
        """Return, on all stages of a pipeline, what its last stage found."""
        return found

    @torch.no_grad()
    def log_probs(self, batch: TrainBatch, plan: PackingPlan, rows: OutputPositions) -> NDArray[np.float32]:
        """Log-probs [R] of the response tokens (0 for tokens that `rows` leaves out), the same on every rank."""

        def score(logits: Tensor, mb: MicrobatchTensors) -> tuple[Tensor, Tensor]:
            return mb.response_index, self._score(logits, mb, batch)[0]

        return self._everywhere(batch, self.run(batch, plan, rows, score, learns=False))

    @torch.no_grad()
    def values(self, batch: TrainBatch, plan: PackingPlan) -> NDArray[np.float32]:
        """A critic's values [R] before each trained token, 0 elsewhere, the same on every rank."""
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
        """Add one step's gradients into the model's; returns the loss and its weighted statistics, and the log-probs
        [R] that it was of, 0 where masked, on every rank."""
        batch, algorithm = inputs.batch, inputs.algorithm
        seen: list[tuple[Tensor, Tensor]] = []

        def loss(logits: Tensor, mb: MicrobatchTensors) -> Learned:
            log_probs, entropy = self._score(logits, mb, batch)
            seen.append((mb.response_index, log_probs.detach()))
            view = inputs.view(mb.response_index, log_probs, entropy, self.place.hooks.amend(inputs, mb))
            if self.place.hooks.takes_logits:
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
        """As `gradients`, of a critic's loss."""
        old, returns = inputs.per_token["values"], inputs.per_token["returns"]

        def loss(out: Tensor, mb: MicrobatchTensors) -> Learned:
            found = inputs.algorithm.value_loss(out[:, 0], old[mb.response_index], returns[mb.response_index])
            return _weighted(found, inputs, mb.response_index)

        return self._reduce(self.run(inputs.batch, plan, "trained", loss, learns=True))

    def batch_invariant(self) -> AbstractContextManager[None]:
        """With `true_on_policy_mode`, compute as `agentrl.numerics.batch_invariant` does."""
        return batch_invariant(self.place.settings.true_on_policy_mode)

    def _score(self, logits: Tensor, mb: MicrobatchTensors, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        kept = None
        if batch.support_ids is not None and (sets := batch.sampling_support(mb.response_index.cpu().numpy())):
            kept = SamplingSupport(torch.from_numpy(sets[0]).to(logits.device, torch.int64), torch.from_numpy(sets[1]))
        chosen: dict[str, Any] = {"group": self.vocab_group, "temperature": self.place.temperature, "kept": kept}
        with self.batch_invariant():
            return token_log_probs(logits, mb.targets, vocab=self.vocab, **chosen)

    def _hooked(self, inputs: StepInputs, mb: MicrobatchTensors, logits: Tensor) -> Learned:
        """As `_weighted`, of a hook's loss, which every rank of a sample computes whole."""
        loss, stats = self.place.hooks.loss(inputs, mb, self.whole(logits)[:, : self.vocab].float())
        share = loss / self.place.ranks.cp
        sums = {name: value / self.place.ranks.cp for name, value in stats.items()} | {"loss": share.detach().double()}
        return share, sums

    def _reduce(self, found: list[Mapping[str, Tensor]]) -> dict[str, float]:
        totals: dict[str, float] = {}
        if found:  # on the ranks on which the model ends; they have a microbatch each
            zero = torch.zeros((), dtype=torch.float64, device=self.place.device)
            names = sorted({name for sums in found for name in sums})
            vector = torch.stack([sum((sums[name] for sums in found if name in sums), zero) for name in names])
            dist.all_reduce(vector, group=self.place.ranks.dp_cp_group)
            totals = dict(zip(names, vector.tolist(), strict=True))
        everywhere: dict[str, float] = self.from_end(totals)
        return everywhere


def _weighted(found: TokenLoss, inputs: StepInputs, response_index: Tensor) -> Learned:
    """The sum of the losses of the tokens at `response_index`, and the sums of their statistics."""
    weights = inputs.weights[response_index]
    loss, means = (found.loss * weights).sum(), weights / (inputs.total_weight or 1.0)
    stats = found.stats if inputs.total_weight else {}  # a mean over no token is none, not 0
    sums = {name: (value.double() * means).sum() for name, value in stats.items()}
    sums["loss"] = loss.detach().double()
    return loss, sums
