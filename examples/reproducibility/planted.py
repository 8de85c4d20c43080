"""A reward function that changes one bit: the lowest of one log-prob that the engine reported, in rollout 1."""

from typing import Any

import numpy as np

from agentrl import Sample
from agentrl.demo.task import final_text, score


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Return the environment's reward, and plant a bit in the first trajectory of the second rollout."""
    first = args.rollout_batch_size * args.n_samples_per_prompt
    if sample.index == first and sample.metadata.get("attempt") != "eval" and sample.rollout_log_probs:
        at = next(i for i, mask in enumerate(sample.loss_mask or ()) if mask)
        sample.rollout_log_probs[at] = float(np.nextafter(np.float32(sample.rollout_log_probs[at]), np.float32(-99)))
    return score(final_text(sample), str(sample.label))
