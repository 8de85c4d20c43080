"""Slow, but it awaits; a task in the background that close ends; cancellation is seen and passed on."""

import asyncio
import contextlib

from agentrl import Environment, Message, Sample, Step, Turn, tool
from agentrl.rm_hub import final_answer


class Env(Environment):
    """Measure the melting point of something; the oven takes its time."""

    max_turns = 3
    watch: asyncio.Task[None] | None = None
    switched_off = False
    looks = 0

    async def reset(self, sample: Sample) -> list[Message]:
        self.watch = asyncio.create_task(self.look_after())
        return await super().reset(sample)

    async def look_after(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self.looks += 1

    @tool
    async def melt(self, thing: str) -> str:
        """Melt something.

        Args:
            thing: what to melt
        """
        return f"{thing} melts at {100 + len(thing)} degrees."

    async def step(self, turn: Turn) -> Step:
        try:
            await asyncio.sleep(0.15)
        except asyncio.CancelledError:
            self.switched_off = True
            raise
        return await super().step(turn)

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.label) in final_answer(sample))

    async def close(self) -> None:
        if self.watch is not None:
            self.watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.watch
            self.watch = None
