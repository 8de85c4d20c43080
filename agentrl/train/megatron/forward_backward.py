"""Forward and backward passes by megatron's schedules. Megatron must not scale gradients, so `calculate_per_token_loss`
is set and the gradient finaliser does not divide."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor

from agentrl.train.batch import TrainBatch
from agentrl.train.forward_backward import ForwardBackward, OnOutput
from agentrl.train.megatron.attention import MegatronPack, Rope
from agentrl.train.megatron.layout import ParallelLayout
from agentrl.train.microbatches import MicrobatchTensors, OutputPositions
from agentrl.train.packing import PackingPlan
from agentrl.train.routing import routing_of


@dataclass(slots=True, kw_only=True)
class MegatronForwardBackward(ForwardBackward):
    """Passes of a megatron model. `model` is wrapped for data parallelism; `config` is its TransformerConfig."""

    config: Any
    layout: ParallelLayout
    rope: Rope

    def __post_init__(self) -> None:
        # Megatron's reductions of gradients, without its division by the number of tokens.
        self.config.finalize_model_grads_func = lambda model, _tokens=None, **how: finalize_model_grads(model, **how)

    def run(
        self, batch: TrainBatch, plan: PackingPlan, rows: OutputPositions, on_output: OnOutput, *, learns: bool
    ) -> list[Any]:
        half = {"fp32_output": False} if self.config.bf16 else {}  # `token_log_probs` widens logits chunk by chunk

        def forward(iterator: Iterator[MicrobatchTensors], model: torch.nn.Module) -> tuple[Tensor, Any]:
            with self.batch_invariant():
                mb = next(iterator)
                cos, sin = self.rope.angles(mb.positions[0], self.config.params_dtype)
                unwrap_model(model).picked_rows = mb.rows
                packed = MegatronPack(mb=mb, cos=cos, sin=sin, routing=self._routing(mb))
                out = model(mb.tokens, mb.positions, None, packed_seq_params=packed, **half)
            return out, functools.partial(_found, on_output=on_output, mb=mb)

        found: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=self.packer.microbatches(batch, plan, rows),
            model=[self.model],
            num_microbatches=len(plan.ranks[0]),
            seq_length=1,
            micro_batch_size=1,
            forward_only=not learns,
            collect_non_loss_data=not learns,
        )
        return found

    def _routing(self, mb: MicrobatchTensors) -> Tensor | None:
        """Return the routing of the tokens of this rank's routers; under sequence parallelism, only its own tokens."""
        if mb.routing is None:
            return None
        routing = routing_of(mb.routing, *self.mixture)
        return routing.chunk(self.layout.tp)[self.layout.tp_rank] if self.config.sequence_parallel else routing

    def whole(self, logits: Tensor) -> Tensor:
        return gather_from_tensor_model_parallel_region(logits, group=self.layout.tp_group)

    def from_end(self, found: Any) -> Any:
        if self.layout.pp == 1:
            return found
        box = [found]
        dist.broadcast_object_list(box, src=self.layout.pp_ranks[-1], group=self.layout.pp_group)
        return box[0]


def _found(out: Tensor, *, on_output: OnOutput, mb: MicrobatchTensors, non_loss_data: bool = False) -> Any:
    """Return what megatron expects: the result to collect; from a model that learns, also a loss and its divisor."""
    found = on_output(out[0], mb)
    return found if non_loss_data else (found[0], torch.ones((), dtype=torch.int, device=found[0].device), found[1])
