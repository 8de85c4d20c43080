# mypy: ignore-errors
from agentrl import Environment, Message, Sample, Turn

MOVES = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}


class Env(Environment):
    """My old gymnasium grid world: the model writes up, down, left or right until it stands on the treasure."""

    max_turns = 8

    async def reset(self, sample: Sample) -> list[Message]:
        self.x = self.y = 0
        return [{"role": "user", "content": "You are at (0, 0), the treasure is at (1, 1). up, down, left or right?"}]

    async def step(self, turn: Turn):
        dx, dy = MOVES.get(turn.content.strip().lower(), (0, 0))
        self.x, self.y = self.x + dx, self.y + dy
        terminated = (self.x, self.y) == (1, 1)
        observation = {"role": "user", "content": f"You are at ({self.x}, {self.y})."}
        return observation, float(terminated), terminated, False, {}
