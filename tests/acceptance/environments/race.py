import time

from agentrl import Environment, Message, Sample
from agentrl.rm_hub import final_answer


class Env(Environment):
    """Answer right, and fast: one point for the answer, up to one more for speed."""

    max_turns = 1

    async def reset(self, sample: Sample) -> list[Message]:
        self.started = time.monotonic()
        return await super().reset(sample)

    async def reward(self, sample: Sample) -> float:
        seconds = time.monotonic() - self.started
        return float(str(sample.label) in final_answer(sample)) + 1 / (1 + seconds)
