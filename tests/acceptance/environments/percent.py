from agentrl import Environment, Sample, tool
from agentrl.rm_hub import final_answer


@tool
def divide(a: float, b: float) -> str:
    """Divide a by b.

    Args:
        a: above the line
        b: below the line
    """
    return str(a / b) if b else "not defined"


class Env(Environment):
    """How many percent? The closer, the better."""

    tools = [divide]
    max_turns = 3

    async def reward(self, sample: Sample) -> float:
        answer = float(final_answer(sample).strip().removesuffix("%"))
        return max(0.0, 1 - abs(answer - float(sample.label)) / 100)
