"""How per-token losses become one number: weights per token, computed once for a whole optimizer step.

1. The weights of a step sum to 1 (to 0 if nothing trains), so the step's loss is `(loss * weights).sum()`.
2. Because the weights are fixed before any split, the sum is the same number under every split of the samples into
   microbatches and data-parallel ranks: each part just adds up its own terms.
"""

import torch
from torch import Tensor


def token_weights(loss_mask: Tensor, lengths: Tensor, rollout_ids: Tensor, *, per_token: bool = False) -> Tensor:
    """The weight of each response token in the step's loss.

    per_token=False: every trajectory counts alike, and within it every trained token. A trajectory that fanned out
    into several samples (they share a rollout id) has one weight, spread over the trained tokens of them all.
    per_token=True: every trained token of the step counts alike (DAPO's token-level loss, arXiv:2503.14476).
    Trajectories without a trained token do not count.

    Args:
        loss_mask: [N] 0 or 1, the response tokens of all samples one after the other.
        lengths: [S] int, response tokens of each sample; sums to N.
        rollout_ids: [S] int; samples of one trajectory share it.

    Returns:
        [N] float64, zero where the mask is zero.
    """
    mask = loss_mask.double()
    if per_token:
        return mask / mask.sum().clamp(min=1)
    members, member_of_sample = torch.unique(rollout_ids, return_inverse=True)
    member_of_token = member_of_sample.repeat_interleave(lengths)
    trained = torch.zeros(len(members), dtype=torch.float64, device=mask.device).index_add(0, member_of_token, mask)
    share = 1 / (trained.clamp(min=1) * (trained > 0).sum().clamp(min=1))
    return mask * share[member_of_token]
