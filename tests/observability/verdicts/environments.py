"""The calculator, spoiled: each class breaks one part of the demo's environment. No part is simulated."""

from collections.abc import Sequence

from agentrl.demo.task import CalculatorEnv, final_text, score
from agentrl.sample import Sample
from agentrl.tools import tool


class ConstantReward(CalculatorEnv):
    """The grader gives every answer the same score."""

    async def reward(self, sample: Sample) -> float:
        return 0.5


class WrongLabel(CalculatorEnv):
    """The grader expects the result plus one."""

    async def reward(self, sample: Sample) -> float:
        return score(final_text(sample), str(int(str(sample.label)) + 1))


class GraderRaises(CalculatorEnv):
    """The grader fails on each right answer."""

    async def reward(self, sample: Sample) -> float:
        if await super().reward(sample) == 1:
            raise ArithmeticError("the right answer was not expected")
        return 0.0


class OtherTemperature(CalculatorEnv):
    """The engine reports log-probs as if it had sampled at a third of the temperature."""

    async def reward(self, sample: Sample) -> float:
        assert sample.rollout_log_probs is not None
        sample.rollout_log_probs = [3 * value for value in sample.rollout_log_probs]
        return await super().reward(sample)


@tool(name="calculator")
async def broken_calculator(expression: str) -> str:
    """Evaluate an expression."""
    raise ConnectionError("the calculator's server does not answer")


class ToolsFail(CalculatorEnv):
    """The tool raises at every call."""

    tools = (broken_calculator,)


async def longer_half(args: object, samples: Sequence[Sample]) -> list[float]:
    """A comparing judge: it prefers the longer answers of a group."""
    by_length = sorted(range(len(samples)), key=lambda at: sum(samples[at].loss_mask or ()))
    return [float(by_length.index(at) >= len(samples) / 2) for at in range(len(samples))]
