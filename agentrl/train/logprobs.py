"""Log-probabilities and entropies over a vocabulary that may be sharded over ranks.

1. Every rank gets the results of the full softmax, in float32. Logits are divided by the sampling temperature first.
2. Rows are processed in chunks, and the backward pass recomputes the softmax instead of storing it.
3. With truncated sampling the softmax is over each row's support alone (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).

With p = softmax(z / T): log-prob of y is z_y/T - logsumexp(z/T), entropy logsumexp(z/T) - E_p[z/T]; their gradients in
z/T are onehot(y) - p and -p (z/T - E_p[z/T])."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 25  # float32 elements of the work space for one chunk of rows
FAR = -1e4  # minimum of a logit minus the mean: p is 0 long before, and 0 times -inf would be NaN


@dataclass(frozen=True, slots=True)
class SamplingSupport:
    """The supports of rows: row i was sampled from `ids[offsets[i]:offsets[i + 1]]`, or from all if it is empty."""

    ids: Tensor  # int64 [K], token ids of the whole vocabulary, on the logits' device
    offsets: Tensor  # int64 [n + 1], on the CPU

    def banned(self, rows: slice, start: int, width: int) -> Tensor:
        """Return bool [rows, width], true where a column, counted from `start`, is outside of the row's support."""
        bounds = self.offsets[rows.start : rows.stop + 1]
        sizes = bounds.diff().to(self.ids.device)
        ids = self.ids[int(bounds[0]) : int(bounds[-1])]
        place = torch.arange(len(sizes), device=ids.device).repeat_interleave(sizes, output_size=len(ids))
        local, mine = _local(ids - start, width)
        out = (sizes > 0)[:, None].expand(-1, width + 1).clone()
        out[place, torch.where(mine, local, width)] = False  # ids of other ranks go to the extra last column
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
    """Return log-probs of `targets`, and entropies, float32 [n], in nats; differentiable in `logits`.

    Args:
        logits: [n, vocabulary of this rank], any float dtype.
        targets: int64 [n], token ids of the whole vocabulary.
        group: the ranks over which the vocabulary is sharded; None: it is whole.
        vocab: size of the whole vocabulary without padding; columns beyond it have probability 0.
        temperature: the sampling temperature (above 0).
        kept: the rows' sampling supports, which contain the targets; None: the whole vocabulary."""
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
    """Return float32 [rows, width]: logits divided by the temperature, -inf outside of the rows' supports."""
    z = logits[rows, : ctx.width].float() / ctx.temperature
    if ctx.kept is not None:
        z.masked_fill_(ctx.kept.banned(rows, ctx.start, ctx.width), -torch.inf)
    return z


def _stats(z: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return [3, rows]: logsumexp, expectation of z, and z of the target, over the whole vocabulary."""
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
    """Return the column of each target on this rank (0 if another rank has it), and whether this rank has it."""
    mine = (targets >= 0) & (targets < width)
    return torch.where(mine, targets, torch.zeros_like(targets)), mine


def _chunks(rows: int, width: int) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]
