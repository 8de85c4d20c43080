"""How per-token losses become one number: weights per token, computed once for a whole optimizer step.

Because they are fixed before any split, `(loss * weights).sum()` is the same number under every split of the samples into
microbatches and data-parallel ranks. With the usual denominator weights sum to 1 (to 0 if nothing trains).
"""

from typing import Literal

import torch
from torch import Tensor

from agentrl.errors import SettingsError


def token_weights(
    loss_mask: Tensor,
    lengths: Tensor,
    rollout_ids: Tensor,
    *,
    per_token: bool = False,
    denominator: Literal["live", "all", "constant"] = "live",
    max_length: int | None = None,
) -> Tensor:
    """The weight of each response token in the step's loss.

    per_token=False: every trajectory counts alike, and within it every trained token. A trajectory that fanned out
    into several samples (they share a rollout id) has one weight, spread over the trained tokens of them all.
    per_token=True: every trained token of the step counts alike (DAPO's token-level loss, arXiv:2503.14476).

    Args:
        loss_mask: [N] 0 or 1, the response tokens of all samples one after the other.
        lengths: [S] int, response tokens of each sample; sums to N.
        rollout_ids: [S] int; samples of one trajectory share it.
        denominator: `live`: trajectories without a trained token do not count. `all`: they count in the mean (GRPO's
            1/G, arXiv:2402.03300), so the weights may sum to less than 1. `constant`: every token weighs
            1 / (trajectories * max_length), whatever the outcome (Dr. GRPO, arXiv:2503.20783).
        max_length: for `constant`.

    Returns:
        [N] float64, zero where the mask is zero.
    """
    mask = loss_mask.double()
    if per_token:
        return mask / mask.sum().clamp(min=1)
    members, member_of_sample = torch.unique(rollout_ids, return_inverse=True)
    if denominator == "constant":
        if max_length is None:
            raise SettingsError("loss_denominator constant needs loss_max_length, the length that it divides by")
        return mask / (max(len(members), 1) * max_length)
    member_of_token = member_of_sample.repeat_interleave(lengths)
    trained = torch.zeros(len(members), dtype=torch.float64, device=mask.device).index_add(0, member_of_token, mask)
    counted = (trained > 0).sum().clamp(min=1) if denominator == "live" else len(members)
    share = 1 / (trained.clamp(min=1) * counted)
    return mask * share[member_of_token]
