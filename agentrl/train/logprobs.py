"""Log-probabilities and entropies over a vocabulary that may be cut over ranks.

1. The result is the full softmax's on every rank, in float32; logits are divided by the sampling temperature first.
2. Rows are processed in chunks and the backward pass recomputes the softmax, so no second [rows, vocabulary] lives.
3. Under truncated sampling the softmax is over each row's support alone (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).

With p = softmax(z / T): log-prob of y is z_y/T - logsumexp(z/T), entropy logsumexp(z/T) - E_p[z/T]; their gradients in
z/T are onehot(y) - p and -p (z/T - E_p[z/T])."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 25  # elements of float32 work space of one chunk of rows
FAR = -1e4  # the most that a logit counts as below the mean: p is 0 long before, and 0 times -inf would be NaN


@dataclass(frozen=True, slots=True)
class SamplingSupport:
    """The tokens that rows were sampled from: row i from `ids[offsets[i]:offsets[i + 1]]`, or all if that is empty."""

    ids: Tensor  # int64 [K], token ids of the whole vocabulary, on the logits' device
    offsets: Tensor  # int64 [n + 1], on the CPU

    def banned(self, rows: slice, start: int, width: int) -> Tensor:
        """bool [rows, width]: which of the columns from `start` on are outside of their row's set."""
        bounds = self.offsets[rows.start : rows.stop + 1]
        sizes = bounds.diff().to(self.ids.device)
        ids = self.ids[int(bounds[0]) : int(bounds[-1])]
        place = torch.arange(len(sizes), device=ids.device).repeat_interleave(sizes, output_size=len(ids))
        local, mine = _local(ids - start, width)
        out = (sizes > 0)[:, None].expand(-1, width + 1).clone()
        out[place, torch.where(mine, local, width)] = False  # the last column takes what is another rank's
        return out[:, :width]


def token_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup | None,
    vocab: int,
    temperature: float = 1.0,
    kept: SamplingSupport | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the chosen tokens, and entropies, float32 [n], in nats; differentiable in `logits`.

    Args:
        logits: [n, vocabulary of this rank], any float dtype.
        targets: int64 [n], token ids of the whole vocabulary.
        group: the ranks that the vocabulary is cut over; None: it is whole.
        vocab: real size of the whole vocabulary; columns that pad it to a multiple of the ranks have probability 0.
        temperature: the sampling temperature (above 0).
        kept: what the rows' tokens were sampled from, each row's target among it; None: from the whole vocabulary."""
    start = group.rank() * logits.size(-1) if group else 0
    width = max(0, min(logits.size(-1), vocab - start))
    log_probs, entropies = _TokenLogProbs.apply(logits, targets, group, start, width, temperature, kept)
    return log_probs, entropies


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Any, *how: Any) -> tuple[Tensor, Tensor]:
        n = logits.size(0)
        ctx.start, ctx.width, ctx.temperature, ctx.kept = how
        stats = torch.empty(3, n, dtype=torch.float32, device=logits.device)  # logsumexp, E[z], target's z
        for rows in _chunks(n, logits.size(-1)):
            stats[:, rows] = _stats(_scaled(ctx, logits, rows), targets[rows] - ctx.start, group)
        log_z, mean, chosen = stats
        ctx.save_for_backward(logits, targets, log_z, mean)
        return chosen - log_z, log_z - mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, log_z, mean = ctx.saved_tensors
        grad_log_prob, grad_entropy = grads
        out = torch.zeros_like(logits)
        for rows in _chunks(logits.size(0), logits.size(-1)):
            z = _scaled(ctx, logits, rows)
            p = torch.exp(z - log_z[rows, None])
            above = (z - mean[rows, None]).clamp(min=FAR)
            g = -p * (grad_log_prob[rows, None] + grad_entropy[rows, None] * above)
            local, mine = _local(targets[rows] - ctx.start, ctx.width)
            picked = torch.where(mine, grad_log_prob[rows], torch.zeros_like(grad_log_prob[rows]))
            if ctx.width:
                g.scatter_add_(1, local[:, None], picked[:, None])
            out[rows, : ctx.width] = (g / ctx.temperature).to(out.dtype)
        return out, None, None, None, None, None, None


def _scaled(ctx: Any, logits: Tensor, rows: slice) -> Tensor:
    """float32 [rows, width]: the logits over the temperature, -inf where sampling was cut off."""
    z = logits[rows, : ctx.width].float() / ctx.temperature
    if ctx.kept is not None:
        z.masked_fill_(ctx.kept.banned(rows, ctx.start, ctx.width), -torch.inf)
    return z


def _stats(z: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[3, rows]: logsumexp, expectation of z, and z of the target, over the whole vocabulary."""
    top = z.amax(-1) if z.size(-1) else torch.full(z.shape[:1], -torch.inf, device=z.device)
    if group and group.size() > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    weights = torch.exp(z - top[:, None])
    local, mine = _local(targets, z.size(-1))
    chosen = z.gather(1, local[:, None])[:, 0] if z.size(-1) else torch.zeros_like(top)
    finite = z.clamp(min=torch.finfo(z.dtype).min)  # a banned token's -inf times its weight 0 would be NaN
    chosen = torch.where(mine, chosen, torch.zeros_like(chosen))
    sums = torch.stack([weights.sum(-1), (weights * finite).sum(-1), chosen])
    if group and group.size() > 1:
        dist.all_reduce(sums, group=group)
    total, weighted, chosen = sums
    return torch.stack([top + torch.log(total), weighted / total, chosen])


def _local(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Column of each target on this rank (0 where it is elsewhere), and whether it is here."""
    mine = (targets >= 0) & (targets < width)
    return torch.where(mine, targets, torch.zeros_like(targets)), mine


def _chunks(rows: int, width: int) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]
