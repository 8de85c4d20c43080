"""Choosing the next token, and the log-probabilities that are reported with it.

1. One counter-based generator (Philox) per request and inversion of the cumulative distribution: a token depends on the
   request's seed, its position and its own logits, never on what else is in the batch.
2. Reported log-probs are of the temperature-scaled distribution, after penalties and bias, before top-k, top-p and
   min-p. They are what a trainer recomputes from the same logits. Who asks gets the kept set as well, and the token's
   log-prob among it: what was really sampled from.
3. Filters: sort by probability; keep the first `top_k`; keep a token while the mass before it is at most `top_p`; keep it
   if its probability is at least `min_p` times the largest. All three look at the unfiltered probabilities.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.engine.embedded.params import SamplingParams

CANDIDATES = 512
"""How many of the largest probabilities are looked at before the whole vocabulary is sorted."""


class Randomness:
    """The uniform numbers of one request: `draw()` gives the next one, in [0, 1)."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed))

    def draw(self) -> float:
        return float(self._generator.random())


Kept = tuple[NDArray[np.int32], float]
"""What the filters left of one row: ids, likeliest first, and the chosen token's log-prob among them."""


@dataclass
class Choice:
    """What one step of sampling gave.

    `tokens`: [N] ids. `log_probs`: [N, vocabulary] float32, the reported distribution. `kept`: by row, where asked for.
    """

    tokens: list[int]
    log_probs: Tensor
    kept: dict[int, Kept]


def adjust(row: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Apply penalties (in place) to one row of logits, shape [vocabulary].

    Repetition (Keskar et al. 2019) counts prompt and output; frequency and presence count the output only.
    """
    if params.penalised:
        if params.repetition_penalty != 1:
            seen = torch.tensor(sorted({*prompt, *output}), device=row.device)
            value = row[seen]
            scale = params.repetition_penalty
            row[seen] = torch.where(value > 0, value / scale, value * scale)
        if output and (params.frequency_penalty or params.presence_penalty):
            ids, counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
            cost = params.frequency_penalty * counts + params.presence_penalty
            row[torch.from_numpy(ids).to(row.device)] -= torch.from_numpy(cost).to(row)
    for token, bias in params.logit_bias:
        row[token] += bias


def choose(
    logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], keep: Collection[int] = ()
) -> Choice:
    """Sample one token for each row of `logits` ([N, vocabulary], already adjusted); `uniforms`: [N] in [0, 1).

    `keep`: rows whose kept sets are wanted; they must have filters.
    """
    scaled = logits.float()
    if any(p.temperature != 1 for p in params):
        scaled = scaled / torch.tensor([p.temperature for p in params], device=logits.device)[:, None]
    log_probs = torch.log_softmax(scaled, dim=-1)
    tokens = torch.zeros(len(params), dtype=torch.long, device=logits.device)
    draws = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None]
    greedy = [i for i, p in enumerate(params) if p.greedy]
    plain = [i for i, p in enumerate(params) if not p.greedy and not p.filtered]
    filtered = [i for i, p in enumerate(params) if not p.greedy and p.filtered]
    kept: dict[int, Kept] = {}
    if greedy:
        tokens[greedy] = _rows(scaled, greedy).argmax(-1)
        kept = {i: (np.array([int(tokens[i])], np.int32), 0.0) for i in greedy if i in keep}
    if plain:
        tokens[plain] = _invert(_rows(log_probs, plain).exp(), draws[plain])
    if filtered:
        some = [params[i] for i in filtered]
        chosen, tables = _choose_filtered(_rows(log_probs, filtered).exp(), some, draws[filtered])
        tokens[filtered] = chosen
        kept |= {i: _kept(*tables[at], chosen[at]) for at, i in enumerate(filtered) if i in keep}
    return Choice(tokens.tolist(), log_probs, kept)


def support(probs: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Sorted probabilities with everything outside the filters' support set to zero, and their ids; both [N, K]."""
    ordered, ids = probs.sort(dim=-1, descending=True)
    return _cut(ordered, params), ids


def _enough(top: Tensor, params: Sequence[SamplingParams]) -> list[bool]:
    """Whether the support of each row surely lies within its sorted candidates `top`."""
    mass = top.sum(-1, dtype=torch.float64).tolist()
    first, last = top[:, 0].tolist(), top[:, -1].tolist()
    return [
        0 < p.top_k <= CANDIDATES or mass[i] > p.top_p or last[i] < p.min_p * first[i] for i, p in enumerate(params)
    ]


def _cut(ordered: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    count = ordered.shape[-1]
    device = ordered.device
    top_k = torch.tensor([p.top_k if p.top_k > 0 else count for p in params], device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[:, None]
    min_p = torch.tensor([p.min_p for p in params], device=device)[:, None]
    wide = ordered.double()
    before = wide.cumsum(-1) - wide
    drop = (torch.arange(count, device=device)[None] >= top_k) | (ordered < ordered[:, :1] * min_p)
    # top_p = 1 keeps all: the rounded mass before a token can pass 1 by an ulp
    drop |= (before > top_p) & (top_p < 1)
    return ordered.masked_fill(drop, 0)


def _choose_filtered(
    probs: Tensor, params: Sequence[SamplingParams], uniforms: Tensor
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Tokens, and what is left of each row's probabilities (else zero) with their ids. Each row decides alone.

    Look at the largest probabilities first; sort whole rows only where that is not enough.
    """
    if probs.shape[-1] <= CANDIDATES:
        left, ids = support(probs, params)
        return _pick(left, ids, uniforms), list(zip(left, ids, strict=True))
    top, ids = probs.topk(CANDIDATES, dim=-1)
    left = _cut(top, params)
    chosen, tables = _pick(left, ids, uniforms), list(zip(left, ids, strict=True))
    rest = [i for i, fits in enumerate(_enough(top, params)) if not fits]
    if rest:
        left, ids = support(probs[rest], [params[i] for i in rest])
        chosen[rest] = _pick(left, ids, uniforms[rest])
        for at, i in enumerate(rest):
            tables[i] = left[at], ids[at]
    return chosen, tables


def _kept(left: Tensor, ids: Tensor, token: Tensor) -> Kept:
    share = left[ids == token].double() / left.sum(dtype=torch.float64)
    return ids[left > 0].to(torch.int32).cpu().numpy(), float(share.log())


def _pick(kept: Tensor, ids: Tensor, uniforms: Tensor) -> Tensor:
    return ids.gather(1, _invert(kept, uniforms)[:, None])[:, 0]


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The index where the cumulative weight passes `uniform * total`, never one of weight zero; [N]."""
    cumulative = weights.double().cumsum(-1)
    index = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)[:, 0]
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(-1)
    return torch.minimum(index, last)


def _rows(values: Tensor, index: list[int]) -> Tensor:
    return values if len(index) == values.shape[0] else values[torch.tensor(index, device=values.device)]
