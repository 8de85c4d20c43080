# mypy: ignore-errors
from agentrl import Environment, Sample
from agentrl.rm_hub import final_answer

POINTS = {3: 1.0, 2: 0.5, 4: 0.5}


class Env(Environment):
    """Write a haiku about the topic: three lines are best, one more or less is half as good."""

    max_turns = 1

    async def reward(self, sample: Sample):
        lines = final_answer(sample).strip().splitlines()
        return POINTS.get(len(lines))
