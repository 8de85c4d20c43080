import asyncio
import itertools

from agentrl import Environment, Step, Turn


class Farm:
    """Stands for a render farm that is asked again and again how far a job is."""

    def __init__(self) -> None:
        self.states = itertools.chain(["queued", "rendering"], itertools.repeat("done"))

    async def state(self) -> str:
        await asyncio.sleep(0.02)
        return next(self.states)


class Env(Environment):
    """The model writes a scene, a farm renders it, and short scenes earn more."""

    max_turns = 1

    async def step(self, turn: Turn) -> Step:
        farm, asked = Farm(), 0
        while await farm.state() != "finished":
            asked += 1
            await asyncio.sleep(min(0.01 * asked, 0.1))
        return Step(done=True, reward=1 / (1 + len(turn.content)))
