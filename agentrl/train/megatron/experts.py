"""A mixture's experts as grouped products: one kernel for all experts of a layer instead of one product per expert."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor


class GroupedExperts(SequentialMLP):
    """Megatron's experts with the same parameter names, so checkpoints and exports are the same. Without biases."""

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Return the outputs [tokens, hidden] of tokens sorted by expert, each times its `probs` [tokens]."""
        ends = tokens_per_expert.to(hidden.device).cumsum(0, dtype=torch.int32)
        weights = [expert.linear_fc1.weight for expert in self.local_experts]
        gate, up = grouped_product(hidden, ends, weights).chunk(2, -1)
        between = (self.config.activation_func(gate) * up * probs[:, None]).to(hidden.dtype)
        return grouped_product(between, ends, [expert.linear_fc2.weight for expert in self.local_experts]), None


SPEC = ModuleSpec(
    GroupedExperts, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
)


class _GroupedProduct(torch.autograd.Function):
    """The product of rows [tokens, in], sorted by expert with bounds `ends` int32 [experts], and each expert's weight
    [out, in]. The stacked weights are a copy, which the backward pass makes again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        return F.grouped_mm(rows, torch.stack(weights).mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows, ends, *weights), grad = ctx.saved_tensors, grads[0]
        grad = grad.contiguous() if len(rows) else grad.new_zeros(grad.shape)  # a gradient may have strides of 0
        to_rows = F.grouped_mm(grad, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return to_rows, None, *(None for _ in weights)
        return to_rows, None, *F.grouped_mm(grad.mT, rows.contiguous(), offs=ends).unbind()


def grouped_product(rows: Tensor, ends: Tensor, weights: list[Tensor]) -> Tensor:
    """Multiply rows [tokens, in], sorted by expert with ends `ends` int32 [experts], by experts' weights [out, in]."""
    found: Tensor = _GroupedProduct.apply(rows, ends, *weights)
    return found
