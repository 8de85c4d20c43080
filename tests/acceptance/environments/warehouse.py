import asyncio

from agentrl import Environment, Message, Sample, tool


class Env(Environment):
    """Take things from a warehouse, where only one robot may work at a time."""

    max_turns = 4

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.taken: list[str] = []

    async def reset(self, sample: Sample) -> list[Message]:
        await self.free.wait()  # the warehouse's turn
        return await super().reset(sample)

    @tool
    async def take(self, thing: str) -> str:
        """Take one thing from its shelf.

        Args:
            thing: its name
        """
        self.taken.append(thing)
        return f"You have {', '.join(self.taken)}."

    async def reward(self, sample: Sample) -> float:
        return float(sample.label in self.taken)

    async def close(self) -> None:
        self.free.set()
