"""Forward and backward passes over a batch's microbatches, through megatron's schedules.

1. The loss of a step is `sum(weight * token loss)` over the whole step, with weights fixed beforehand. Megatron is
   told to scale nothing (`calculate_per_token_loss` with a gradient finaliser that divides by nothing): gradients
   are plain sums over microbatches, data-parallel and context-parallel ranks, under every layout.
2. Every rank of the last pipeline stage computes its own tokens; results are then summed over data and context
   parallelism and sent along the pipeline, so that all ranks hold the same numbers.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.algorithm import Algorithm
from agentrl.algorithms.base import TokenLoss, need
from agentrl.algorithms.ops.mismatch import PEAK, mismatch_sums
from agentrl.exact import exactly
from agentrl.train.batch import TrainBatch
from agentrl.train.hooks import Microbatch, TrainHooks
from agentrl.train.megatron.data import MicrobatchTensors, Packer, Rows
from agentrl.train.megatron.layout import Layout
from agentrl.train.megatron.logprobs import KeptSets, token_log_probs
from agentrl.train.megatron.model import output_rows
from agentrl.train.objective import StepInputs
from agentrl.train.packing import Plan


@dataclass(slots=True)
class Passes:
    """Runs one model over batches; `model` is wrapped for data parallelism, `config` is its TransformerConfig.

    With `exact` its forward passes are those of `agentrl.exact`.
    """

    model: torch.nn.Module
    config: Any
    packer: Packer
    vocab: int
    temperature: float
    hooks: TrainHooks
    exact: bool = False

    def __post_init__(self) -> None:
        self.config.finalize_model_grads_func = _finalize

    @torch.no_grad()
    def log_probs(self, batch: TrainBatch, plan: Plan, rows: Rows) -> NDArray[np.float32]:
        """Log-probs [R] of the response tokens (0 for those that `rows` leaves out), the same on every rank."""
        score = functools.partial(self._only_log_probs, batch=batch)
        return self._everywhere(batch, self._run(batch, plan, rows, score, forward_only=True))

    @torch.no_grad()
    def values(self, batch: TrainBatch, plan: Plan) -> NDArray[np.float32]:
        """A critic's values [R] before each trained token, 0 elsewhere, the same on every rank."""
        return self._everywhere(batch, self._run(batch, plan, "trained", self._only_values, forward_only=True))

    def _everywhere(self, batch: TrainBatch, pairs: list[Any]) -> NDArray[np.float32]:
        out = torch.zeros(len(batch.loss_mask), dtype=torch.float32, device=self.device)
        for flat, found in pairs:
            out[flat] = found
        dist.all_reduce(out, group=self.layout.dp_cp_group)
        if self.layout.pp > 1:
            dist.broadcast(out, src=self.layout.pp_ranks[-1], group=self.layout.pp_group)
        return out.cpu().numpy()

    def gradients(
        self, batch: TrainBatch, plan: Plan, inputs: StepInputs, algorithm: Algorithm
    ) -> tuple[dict[str, float], NDArray[np.float32]]:
        """Add one step's gradients into the model's buffers.

        Returns:
            The loss and its weighted statistics; the log-probs [R] that it was of, 0 where masked, on every rank.
        """
        seen: list[tuple[Tensor, Tensor]] = []
        loss = functools.partial(self._loss, batch=batch, inputs=inputs, algorithm=algorithm, seen=seen)
        rows: Rows = "response" if self.hooks.takes_logits else "trained"
        totals = self._reduce(self._run(batch, plan, rows, loss, forward_only=False))
        computed = totals.pop("computed_tokens")
        shares = {"computed_tokens_share": computed, "copied_tokens_share": computed - plan.distinct}
        return totals | {name: tokens / plan.tokens for name, tokens in shares.items()}, self._everywhere(batch, seen)

    def value_gradients(
        self, batch: TrainBatch, plan: Plan, inputs: StepInputs, algorithm: Algorithm
    ) -> dict[str, float]:
        """As `gradients`, of a critic's loss."""
        loss = functools.partial(self._value_loss, inputs=inputs, algorithm=algorithm)
        return self._reduce(self._run(batch, plan, "trained", loss, forward_only=False))

    def _run(
        self, batch: TrainBatch, plan: Plan, rows: Rows, on_logits: Callable[..., Any], *, forward_only: bool
    ) -> list[Any]:
        def forward(iterator: Iterator[MicrobatchTensors], model: torch.nn.Module) -> tuple[Tensor, Any]:
            with exactly(self.exact):
                mb = next(iterator)  # the angles of its positions are computed here
                output_rows(model, mb.rows)
                out = model(mb.tokens, mb.positions, None, packed_seq_params=mb.packed, **self._output_dtype)
            return out, functools.partial(on_logits, mb=mb)

        found: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=self.packer.microbatches(batch, plan, rows),
            model=[self.model],
            num_microbatches=plan.num_microbatches,
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return found

    @property
    def layout(self) -> Layout:
        return self.packer.layout

    @property
    def device(self) -> torch.device:
        return self.packer.device

    @property
    def _output_dtype(self) -> dict[str, bool]:
        """Keep half-precision logits as they are; `token_log_probs` works in float32 chunk by chunk."""
        return {"fp32_output": False} if self.config.bf16 else {}

    def _score(self, logits: Tensor, mb: MicrobatchTensors, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        kept = None
        if batch.kept_ids is not None and (sets := batch.kept_sets(mb.flat.cpu().numpy())):
            kept = KeptSets(torch.from_numpy(sets[0]).to(logits.device, torch.int64), torch.from_numpy(sets[1]))
        group, temperature = self.layout.tp_group, self.temperature
        with exactly(self.exact):
            return token_log_probs(
                logits[0], mb.targets, group=group, vocab=self.vocab, temperature=temperature, kept=kept
            )

    def _only_log_probs(
        self, logits: Tensor, *, mb: MicrobatchTensors, batch: TrainBatch, non_loss_data: bool
    ) -> tuple[Tensor, Tensor]:
        return mb.flat, self._score(logits, mb, batch)[0]

    def _only_values(self, out: Tensor, *, mb: MicrobatchTensors, non_loss_data: bool) -> tuple[Tensor, Tensor]:
        return mb.flat, out[0, :, 0]

    def _value_loss(
        self, out: Tensor, *, mb: MicrobatchTensors, inputs: StepInputs, algorithm: Algorithm
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        old, returns = inputs.per_token["values"], need(inputs.returns, "returns", "a critic")
        return _weighted(algorithm.value_loss(out[0, :, 0], old[mb.flat], returns[mb.flat]), inputs, mb)

    def _loss(
        self,
        logits: Tensor,
        *,
        mb: MicrobatchTensors,
        batch: TrainBatch,
        inputs: StepInputs,
        algorithm: Algorithm,
        seen: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        log_probs, entropy = self._score(logits, mb, batch)
        seen.append((mb.flat, log_probs.detach()))
        part = Microbatch(batch, inputs, mb.samples, mb.flat, self._join)
        view = inputs.view(mb.flat, log_probs, entropy, self._join, self.hooks.amend(part))
        if self.hooks.takes_logits:
            loss, one, sums = self._hooked(part, logits[0])
        else:
            loss, one, sums = _weighted(algorithm.token_loss(view), inputs, mb)
        computed = mb.computed / self.layout.cp
        sums["computed_tokens"] = torch.tensor(computed, dtype=torch.float64, device=loss.device)
        if view.rollout_log_probs is not None:
            sums |= mismatch_sums(view, engine_is_old=bool(algorithm.settings.use_rollout_logprobs))
        return loss, one, sums

    def _hooked(self, part: Microbatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """As `_weighted`, of a hook's loss, which every rank of a sample computes whole."""
        whole = gather_from_tensor_model_parallel_region(logits, group=self.layout.tp_group)[:, : self.vocab]
        loss, stats = self.hooks.loss(part, whole.float())
        share = loss / self.layout.cp
        sums = {name: value / self.layout.cp for name, value in stats.items()} | {"loss": share.detach().double()}
        return share, torch.ones((), dtype=torch.int, device=loss.device), sums

    def _join(self, sums: Tensor) -> Tensor:
        return sums if self.layout.cp == 1 else _Joined.apply(sums, self.layout.cp_group)

    def _reduce(self, found: list[dict[str, Tensor]]) -> dict[str, float]:
        totals: dict[str, float] = {}
        if self.layout.last_stage:
            sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=self.device))
            for entry in found:
                for name, value in entry.items():
                    sums[name] = torch.maximum(sums[name], value) if name == PEAK else sums[name] + value
            peak, names = sums.pop(PEAK, None), sorted(sums)
            vector = torch.stack([sums[name] for name in names])
            dist.all_reduce(vector, group=self.layout.dp_cp_group)
            totals = dict(zip(names, vector.tolist(), strict=True))
            if peak is not None:
                dist.all_reduce(peak, dist.ReduceOp.MAX, group=self.layout.dp_cp_group)
                totals[PEAK] = float(peak)
        return _along_pipeline(totals, self.layout)


def _weighted(found: TokenLoss, inputs: StepInputs, mb: MicrobatchTensors) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A microbatch's loss as megatron takes it: the sum, what to divide it by, and the sums of statistics."""
    weights = inputs.weights[mb.flat]
    loss, means = (found.loss * weights).sum(), weights / inputs.total_weight
    sums = {name: (value.double() * means).sum() for name, value in found.stats.items()}
    sums["loss"] = loss.detach().double()
    return loss, torch.ones((), dtype=torch.int, device=loss.device), sums


class _Joined(torch.autograd.Function):
    """Sums over the ranks that hold parts of the same samples; every rank's loss reads them, so gradients add up too."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(sums, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


def _summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = values.clone()
    dist.all_reduce(total, group=group)
    return total


def _along_pipeline(totals: Mapping[str, float], layout: Layout) -> dict[str, float]:
    if layout.pp == 1:
        return dict(totals)
    box = [dict(totals)]
    dist.broadcast_object_list(box, src=layout.pp_ranks[-1], group=layout.pp_group)
    return box[0]


def _finalize(model: list[torch.nn.Module], _num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's gradient reductions without its division by the number of tokens."""
    finalize_model_grads(model, None, **kwargs)
