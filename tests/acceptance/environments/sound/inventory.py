"""State of the instance, plain functions that wait (they have threads of their own), dice with the sample's seed."""

import random
import time

from agentrl import Environment, Message, Sample, tool
from agentrl.tools import ToolError


class Env(Environment):
    """Collect berries; how many a bush has is decided by dice that each trajectory throws anew."""

    max_turns = 5

    def __init__(self) -> None:
        self.berries = 0
        self.visited: set[str] = set()

    async def reset(self, sample: Sample) -> list[Message]:
        self.dice = random.Random(sample.index or 0)
        return await super().reset(sample)

    @tool
    def pick(self, bush: str) -> dict[str, int]:
        """Pick the berries of a bush.

        Args:
            bush: its name
        """
        time.sleep(0.2)
        if bush in self.visited:
            raise ToolError(f"The bush {bush} is empty.")
        self.visited.add(bush)
        found = self.dice.randint(1, 6)
        self.berries += found
        return {"found": found, "in all": self.berries}

    async def reward(self, sample: Sample) -> float:
        return self.berries / 30
