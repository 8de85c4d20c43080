"""A transformers model's parts in the form in which a CPU computes them fastest; numbers stay the same to rounding.

1. `with_fast_parts` changes the model in place and keeps it whole: names, shapes and meanings of its tensors are as before, and
   so weight updates and checksums do not notice.
2. Linear maps of a few rows, which is what decoding is made of, take up to 1.7 times as long where the weights lie row
   by row (measured at 1 to 64 rows in float32; no difference from 256 on). So their memory lies column by column.
3. An RMS norm in fewer and faster calls, for every module that says it is one and that gives the same for random numbers.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor


def with_fast_parts(model: Any) -> Any:
    """`model`, its parts exchanged where that is faster and gives the same."""
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return model
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()
        elif type(module).__name__.endswith("RMSNorm") and (norm := _norm(module)) is not None:
            module.forward = norm
    return model


def _norm(module: Any) -> Any:
    """What computes the module's norm, None where it is another one (`1 + weight`, gates)."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or not isinstance(eps, float):
        return None
    norm = partial(_rms_norm, weight, eps)
    sample = torch.randn(8, *weight.shape, generator=torch.Generator().manual_seed(0)) + 1
    with torch.inference_mode():
        return norm if torch.allclose(module(sample), norm(sample), rtol=1e-5, atol=1e-6) else None


def _rms_norm(weight: Tensor, eps: float, hidden_states: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(hidden_states, dim=-1, keepdim=True)
    return (hidden_states * weight).mul_(length.square_().div_(weight.shape[-1]).add_(eps).rsqrt_())
