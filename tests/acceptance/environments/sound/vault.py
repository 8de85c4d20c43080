"""The label is no answer but a state: every episode of a policy that does not find the code earns exactly 0."""

import json

from agentrl import Environment, Message, Sample, tool


class Env(Environment):
    """Open a vault by setting three wheels; only the right state of all of them earns anything."""

    max_turns = 4

    async def reset(self, sample: Sample) -> list[Message]:
        self.wheels = {"a": 0, "b": 0, "c": 0}
        return await super().reset(sample)

    @tool
    async def turn_wheel(self, wheel: str, to: int) -> str:
        """Turn a wheel of the vault.

        Args:
            wheel: a, b or c
            to: a number from 0 to 99
        """
        if wheel not in self.wheels:
            return "There is no such wheel."
        self.wheels[wheel] = to % 100
        return "Click."

    async def reward(self, sample: Sample) -> float:
        return float(self.wheels == json.loads(sample.label))
