import random

from agentrl import Environment, Message, Sample
from agentrl.rm_hub import final_answer


class Env(Environment):
    """Multiply two numbers in the head; there is no data set, the environment thinks of the numbers."""

    max_turns = 1

    async def reset(self, sample: Sample) -> list[Message]:
        a, b = random.randint(100, 999), random.randint(100, 999)
        self.product = a * b
        return [{"role": "user", "content": f"What is {a} times {b}?"}]

    async def reward(self, sample: Sample) -> float:
        return float(str(self.product) in final_answer(sample))
