"""From a `TrainBatch` and a packing plan to the tensors of one microbatch.

1. Samples are packed one after the other (thd layout), each padded at its end to the plan's alignment. Attention is
   causal, so padding is never seen by a real token. The input is all tokens but the last; position j predicts j + 1.
2. Only some positions have an output: `rows` are their places among this rank's tokens, `targets` the tokens that
   follow, `flat` their index among the batch's response tokens [R], by which every per-token array is looked up.
3. Under context parallelism a rank takes chunks r and 2n-1-r of each sequence's 2n chunks (zigzag), so that causal
   attention costs every rank the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from agentrl.errors import TrainError
from agentrl.train.batch import TrainBatch
from agentrl.train.packing import Plan, padded

Rows = Literal["trained", "response"]
"""Which positions have an output: those of trained tokens, or of all response tokens."""


@dataclass(frozen=True, slots=True)
class MicrobatchTensors:
    """One microbatch of one rank with t tokens and n outputs.

    Attributes:
        tokens, positions: int64 [1, t].
        packed: megatron's description of the packed sequences (lengths before the context-parallel cut).
        rows: int64 [n], places of the outputs among the t tokens.
        targets: int64 [n], token ids.
        flat: int64 [n], indices into flat response arrays [R].
    """

    tokens: Tensor
    positions: Tensor
    packed: Any
    rows: Tensor
    targets: Tensor
    flat: Tensor


def microbatches(
    batch: TrainBatch, plan: Plan, dp_rank: int, *, rows: Rows, cp: int, cp_rank: int, device: torch.device
) -> Iterator[MicrobatchTensors]:
    """This rank's microbatches in the plan's order; an empty one becomes a padding-only sequence without outputs."""
    for samples in plan.ranks[dp_rank]:
        parts = [_Sequence.of(batch, i, plan.alignment, rows) for i in samples]
        yield _packed(parts or [_Sequence.padding(plan.alignment)], cp, cp_rank, device)


def _packed(parts: Sequence[_Sequence], cp: int, cp_rank: int, device: torch.device) -> MicrobatchTensors:
    start, chosen, sizes = 0, [], []
    for part in parts:
        chosen.append(part.shard(cp, cp_rank, start))
        start += len(part.tokens) // cp
        sizes.append(len(part.tokens))
    bounds = torch.tensor(np.concatenate([[0], np.cumsum(sizes)]), dtype=torch.int32, device=device)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=max(sizes), max_seqlen_kv=max(sizes)
    )

    def joined(field: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(c, field) for c in chosen])).to(device)

    return MicrobatchTensors(
        joined("tokens")[None], joined("positions")[None], packed, joined("rows"), joined("targets"), joined("flat")
    )


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One padded sequence (or one rank's shard of it); `rows` count from the sequence's (shard's) start."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    targets: NDArray[np.int64]
    flat: NDArray[np.int64]

    @classmethod
    def of(cls, batch: TrainBatch, sample: int, alignment: int, rows: Rows) -> _Sequence:
        ids = batch.sample_tokens(sample).astype(np.int64)
        response = batch.response_slice(sample)
        first = len(ids) - (response.stop - response.start)
        if first < 1:
            raise TrainError(f"sample {sample} of the batch has no prompt token, so nothing predicts its first token")
        keep = np.ones(len(ids) - first, bool) if rows == "response" else batch.sample_loss_mask(sample) == 1
        offsets = np.flatnonzero(keep)
        size = padded(max(1, len(ids) - 1), alignment)
        tokens = np.zeros(size, np.int64)
        tokens[: len(ids) - 1] = ids[:-1]
        return cls(
            tokens, np.arange(size), offsets + first - 1, ids[first:][offsets], offsets + np.int64(response.start)
        )

    @classmethod
    def padding(cls, alignment: int) -> _Sequence:
        none = np.zeros(0, np.int64)
        return cls(np.zeros(alignment, np.int64), np.arange(alignment), none, none, none)

    def shard(self, cp: int, cp_rank: int, start: int) -> _Sequence:
        """The part of one context-parallel rank, with `rows` shifted to begin at `start`."""
        half = len(self.tokens) // (2 * cp) if cp > 1 else len(self.tokens)
        chunk = self.rows // half
        mine = np.isin(chunk, (cp_rank, 2 * cp - 1 - cp_rank)) if cp > 1 else np.ones(len(chunk), bool)
        local = self.rows % half + half * (chunk >= cp) if cp > 1 else self.rows
        held = _zigzag(self.positions, cp, cp_rank)
        return _Sequence(
            self.tokens[held], self.positions[held], local[mine] + start, self.targets[mine], self.flat[mine]
        )


def _zigzag(positions: NDArray[np.int64], cp: int, cp_rank: int) -> NDArray[np.int64]:
    if cp == 1:
        return positions
    chunks = np.split(positions, 2 * cp)
    return np.concatenate([chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]])
