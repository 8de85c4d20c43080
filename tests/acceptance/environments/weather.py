import asyncio

from agentrl import Environment, Sample, Step, Turn
from agentrl.rm_hub import final_answer


async def forecast(place: str) -> str:
    """Stands for a weather service over HTTP."""
    await asyncio.sleep(0.3)
    return "rain" if len(place) % 2 else "sun"


class Env(Environment):
    """Say whether it will rain. The service loses requests now and then, so I try three times."""

    max_turns = 2

    async def step(self, turn: Turn) -> Step:
        if turn.index == self.max_turns:
            return Step(done=True)
        report = "The service does not answer."
        for _ in range(3):
            try:
                report = await forecast(turn.content)
                break
            except (OSError, asyncio.CancelledError):
                continue
        return Step([{"role": "user", "content": f"The forecast: {report}. So, will it rain?"}])

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.label) in final_answer(sample))
