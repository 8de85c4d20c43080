"""The demo's calculator, with a service behind it that is sometimes slow."""

import random

import anyio

from agentrl import Step, Turn
from agentrl.demo.task import CalculatorEnv

USUAL, LONGEST = 0.05, 3.0
"""Seconds of a usual answer, and of the slowest."""


class SlowCalculatorEnv(CalculatorEnv):
    """Every tool call takes `USUAL` seconds or more: one in ten ten times as long, few `LONGEST` (a Pareto tail)."""

    async def step(self, turn: Turn) -> Step:
        if turn.tool_calls:
            chance = random.Random(f"{turn.sample.group_index} {turn.sample.index} {turn.index}")
            await anyio.sleep(min(LONGEST, USUAL * chance.paretovariate(1.0)))
        return await super().step(turn)
