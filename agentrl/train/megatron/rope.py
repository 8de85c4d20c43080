"""Rotary positions (RoFormer, arXiv:2104.09864) as transformers computes them for a config.

1. Frequencies and the factor of cosines and sines come from transformers' own functions, so every `rope_type` that it has
   works: linear, llama3, yarn, longrope, dynamic, partial rotation.
2. Longrope and dynamic change their frequencies with a sequence's length, and so they would differ between siblings that
   share a prefix: samples beyond the length at which they begin to are refused. So are samples longer than a sliding
   window, which layers here do not have; within it there is no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import TrainError
from agentrl.train.megatron.families import theirs
from agentrl.train.network import rope_reach


@dataclass(frozen=True, slots=True)
class Rope:
    """How a model's positions turn its queries and keys.

    Attributes:
        frequencies: float32 [rotated channels / 2], angle per position.
        factor: of cosines and sines.
        reach: see `Network.reach`.
    """

    frequencies: Tensor
    factor: float
    reach: tuple[int, str] | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rope:
        """For a `config.json` of a family.

        Raises:
            TrainError: a rope type that transformers has no function for.
        """
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        read = theirs(config)
        rope = read.rope_parameters
        kind = rope["rope_type"]
        window = getattr(read, "sliding_window", None)
        limits = [rope_reach(read), (window, "sliding_window") if window else None]
        if kind == "default":
            kind, read.rope_parameters = "linear", {**rope, "rope_type": "linear", "factor": 1.0}
        if kind not in ROPE_INIT_FUNCTIONS:
            known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
            raise TrainError(f"rope type {kind!r} cannot be trained with megatron; expected one of {known}")
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](read)
        return cls(frequencies, factor, min(filter(None, limits), default=None))

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [t, 1, rotated channels / 2] of positions [t], times the factor, in `dtype`."""
        found = positions[:, None, None].float() * self.frequencies.to(positions.device)
        return (found.cos() * self.factor).to(dtype), (found.sin() * self.factor).to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn the first channels of x [t, heads, dim], as many as there are angles for, in halves or in neighbouring pairs."""
    turned, rest = x.split([2 * cos.size(-1), x.size(-1) - 2 * cos.size(-1)], -1)
    first, second = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    pair = first * cos - second * sin, second * cos + first * sin
    out = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([out, rest], -1) if rest.size(-1) else out
