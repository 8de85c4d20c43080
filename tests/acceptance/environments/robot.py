import asyncio

from agentrl import Environment, Message, Sample, tool


class Env(Environment):
    """Let a robot arm grip things. Its battery runs down all the time, as that of the real one does."""

    max_turns = 4

    async def reset(self, sample: Sample) -> list[Message]:
        self.battery = 100
        self.gripped: list[str] = []
        self.drain = asyncio.create_task(self.run_down())
        return await super().reset(sample)

    async def run_down(self) -> None:
        while True:
            await asyncio.sleep(60)
            self.battery -= 1

    @tool
    async def grip(self, thing: str) -> str:
        """Grip something.

        Args:
            thing: what to grip
        """
        self.gripped.append(thing)
        return f"The arm holds: {', '.join(self.gripped)}."

    async def reward(self, sample: Sample) -> float:
        return float(sample.label in self.gripped)

    async def close(self) -> None:
        self.gripped.clear()
