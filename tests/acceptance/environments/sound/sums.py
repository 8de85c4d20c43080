"""It makes its own prompts, the same for all samples of a group, with examples in which the assistant has answered."""

import random

from agentrl import Environment, Message, Sample
from agentrl.rm_hub import final_answer


class Env(Environment):
    """Add two numbers; there is no data set, the group's number is the seed."""

    max_turns = 1

    async def reset(self, sample: Sample) -> list[Message]:
        dice = random.Random(sample.group_index or 0)
        a, b = dice.randint(10, 99), dice.randint(10, 99)
        self.total = a + b
        return [
            {"role": "system", "content": "You add numbers. Say only the sum."},
            {"role": "user", "content": "What is 20 + 22?"},
            {"role": "assistant", "content": "42"},
            {"role": "user", "content": f"What is {a} + {b}?"},
        ]

    async def reward(self, sample: Sample) -> float:
        return float(final_answer(sample).strip() == str(self.total))
