"""A fake for fault injection: `RetoolEnv` whose tool fails in 5 % of calls and hangs in 1 %, before the real tool."""

import random
from functools import cached_property
from typing import ClassVar, Literal

import anyio

from agentrl.tools import Tool, Toolbox
from examples.retool.env import RetoolEnv

FAILING, HANGING = 0.05, 0.01
_CHANCE = random.Random("faults")


class FaultyRetoolEnv(RetoolEnv):
    """Faults are observations for the model."""

    on_failure: ClassVar[Literal["observe", "fail"]] = "observe"

    @cached_property
    def toolbox(self) -> Toolbox:
        real = next(iter(super().toolbox))

        async def python(code: str) -> str:
            draw = _CHANCE.random()
            if draw < FAILING:
                raise ConnectionError("injected")
            if draw < FAILING + HANGING:
                await anyio.sleep_forever()
            return str(await real.call({"code": code}, state=self))

        return Toolbox([Tool(python, description=real.description, timeout=10, on_failure=self.on_failure)])


class FailingRetoolEnv(FaultyRetoolEnv):
    """Faults end the trajectory, and the run's failure policy decides (by default: another attempt)."""

    on_failure = "fail"
