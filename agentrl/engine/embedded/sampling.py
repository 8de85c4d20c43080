"""The choice of the next token, and the log-probabilities that are reported with it.

1. Each request has a Philox generator: a token depends on seed, position and logits, never on the batch.
2. Reported log-probs are of the temperature-scaled distribution after penalties and bias, before filters. On request
   the answer also holds the support and the log-prob within it.
3. Filters read the unfiltered probabilities. A token is kept if it is among the first `top_k`, the mass before it is at
   most `top_p`, and it has at least `min_p` times the largest probability."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.engine.embedded import filtering
from agentrl.engine.request_sampling import RequestSampling

# Sampling support of one row: ids, likeliest first, and the chosen token's log-prob within the support.
Kept = tuple[NDArray[np.int32], float]
_MOST = 1e30  # maximum size of a logit after penalties and bias; infinities would make NaN of the log-probs


@dataclass
class Choice:
    """Result of one sampling step."""

    tokens: list[int]  # [N]
    log_probs: Tensor  # [N, vocabulary] float32, the reported distribution
    kept: dict[int, Kept]  # by row, if requested


def adjust(row: Tensor, params: RequestSampling, output: Sequence[int]) -> None:
    """Apply penalties (in place) to one row of logits, shape [vocabulary]. As in SGLang, all count the output only, and
    repetition (Keskar et al. 2019) comes after frequency and presence."""
    if output and (params.frequency_penalty or params.presence_penalty):
        ids, counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
        cost = params.frequency_penalty * counts + params.presence_penalty
        row[torch.from_numpy(ids).to(row.device)] -= torch.from_numpy(cost).to(row)
    if output and params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*output}), device=row.device)
        value, scale = row[seen], params.repetition_penalty
        row[seen] = torch.where(value > 0, value / scale, value * scale).clamp(-_MOST, _MOST)
    for token, bias in params.logit_bias.items():
        row[token] = (row[token] + bias).clamp(-_MOST, _MOST)


def choose(
    logits: Tensor, params: Sequence[RequestSampling], uniforms: Sequence[float], keep: Collection[int] = ()
) -> Choice:
    """Sample one token for each row of `logits` ([N, vocabulary], already adjusted). `uniforms`: [N] in [0, 1). `keep`:
    indices of rows whose kept sets are requested; these rows must have filters."""
    scaled = logits.float()
    if any(p.temperature != 1 for p in params):
        scaled = scaled / torch.tensor([p.temperature for p in params], device=logits.device)[:, None]
    log_probs = torch.log_softmax(scaled, dim=-1)
    tokens = torch.zeros(len(params), dtype=torch.long, device=logits.device)
    draws = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None]
    kept: dict[int, Kept] = {}
    if greedy := [i for i, p in enumerate(params) if p.greedy]:
        tokens[greedy] = _rows(scaled, greedy).argmax(-1)
        kept = {i: (np.array([int(tokens[i])], np.int32), 0.0) for i in greedy if i in keep}
    if plain := [i for i, p in enumerate(params) if not p.greedy and not p.filtered]:
        tokens[plain] = _invert(_rows(log_probs, plain).exp(), draws[plain])
    if filtered := [i for i, p in enumerate(params) if not p.greedy and p.filtered]:
        probs = _rows(log_probs, filtered).exp().nan_to_num_(0.0)
        tokens[filtered], counts = _choose_filtered(probs, [params[i] for i in filtered], draws[filtered])
        kept |= {i: _kept(probs[at], int(counts[at]), tokens[i]) for at, i in enumerate(filtered) if i in keep}
    return Choice(tokens.tolist(), log_probs, kept)


def _choose_filtered(probs: Tensor, params: Sequence[RequestSampling], uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens [N], and for each row the number of largest probabilities that the filters keep [N]."""
    size = probs.shape[-1]
    top_k = np.array([p.top_k if 0 < p.top_k < size else size for p in params])
    # top_p = 1 keeps all tokens: the rounded mass before a token can exceed 1 by an ulp
    top_p = np.array([p.top_p if p.top_p < 1 else 2.0 for p in params])
    min_p = np.array([p.min_p for p in params], np.float32)
    tokens, counts = np.zeros((2, len(params)), np.int64)
    filtering.choose(probs.cpu().numpy(), top_k, top_p, min_p, uniforms[:, 0].cpu().numpy(), tokens, counts)
    return torch.from_numpy(tokens).to(probs.device), torch.from_numpy(counts)


def _kept(probs: Tensor, count: int, token: Tensor) -> Kept:
    values, ids = (part[:count] for part in probs.sort(descending=True, stable=True))
    share = probs[token].double() / values.sum(dtype=torch.float64)
    return ids[values > 0].to(torch.int32).cpu().numpy(), float(share.log())


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the index [N] at which the cumulative weight passes `uniform * total`; never an index of weight zero."""
    mass = weights.double().cumsum(-1)
    total = mass[:, -1:]
    most = total.nextafter(torch.zeros_like(total))  # rounding may raise a target to the total
    index = torch.searchsorted(mass, torch.minimum(uniforms * total, most), right=True)
    return index[:, 0].clamp(max=weights.shape[-1] - 1)


def _rows(values: Tensor, index: list[int]) -> Tensor:
    return values if len(index) == values.shape[0] else values[torch.tensor(index, device=values.device)]
