"""`TokenView`s for tests: by default one sample, all of it trained, on one rank."""

from typing import Any

import torch

from agentrl.algorithms import TokenView


def view(log_probs: torch.Tensor, **changes: Any) -> TokenView:
    n = len(log_probs)
    ids = torch.zeros(n, dtype=torch.int64)
    fields: dict[str, Any] = {
        "loss_mask": torch.ones(n, dtype=torch.uint8),
        "sample_ids": ids,
        "turn_ids": ids,
        "trajectory_ids": ids,
        "staleness": ids,
        "num_samples": 1,
        "join": lambda sums: sums,
        "entropy": torch.zeros_like(log_probs),
        "old_log_probs": log_probs.detach(),
        "advantages": torch.zeros_like(log_probs),
    }
    return TokenView(log_probs=log_probs, **(fields | changes))
