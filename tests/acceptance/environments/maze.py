# mypy: ignore-errors
from agentrl import Environment, Sample, tool

STEPS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}


class Env(Environment):
    """Walk to the exit of a small maze, one field at a time, and say "out" when there."""

    max_turns = 6

    async def reset(self, sample: Sample):
        self.at = (0, 0)
        self.exit = (2, 1)

    @tool
    async def move(self, direction: str) -> str:
        """Go one field.

        Args:
            direction: north, south, east or west
        """
        if direction not in STEPS:
            return "There is a wall."
        dx, dy = STEPS[direction]
        self.at = (self.at[0] + dx, self.at[1] + dy)
        return f"You stand at {self.at}."

    async def reward(self, sample: Sample) -> float:
        return float(self.at == self.exit)
