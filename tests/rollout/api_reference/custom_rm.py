# The reference's example; only the imports differ from it.
from agentrl import Sample


async def reward_func(args, sample: Sample, **kwargs) -> float:
    response = sample.response
    ground_truth = sample.label or sample.metadata.get("answer", "")
    # Example: exact match reward
    if response.strip() == ground_truth.strip():
        return 1.0
    return 0.0


# For batched processing (more efficient)
async def batched_custom_rm(args, samples: list[Sample]) -> list[float]:
    rewards = []
    for sample in samples:
        reward = await reward_func(args, sample)
        rewards.append(reward)
    return rewards
