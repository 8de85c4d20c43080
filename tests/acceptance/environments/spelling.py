from agentrl import Environment, Sample
from agentrl.rm_hub import final_answer


class Env(Environment):
    """Write a word without its mistake; upper case is no matter."""

    max_turns = 1

    async def reward(self, sample: Sample) -> float:
        return float(sample.label.lower() in final_answer(sample).lower())
