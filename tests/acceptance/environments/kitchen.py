from collections.abc import Callable

from agentrl import Environment, Sample, Step, Turn, tool


@tool
def chop(food: str) -> str:
    """Cut something into pieces.

    Args:
        food: what to cut
    """
    return f"{food}, chopped"


@tool
def fry(food: str) -> str:
    """Put something into the pan.

    Args:
        food: what to fry
    """
    return f"{food}, fried"


ACTIONS: dict[str, Callable[[str], str]] = {
    "chop": lambda food: f"{food}, chopped",
    "fry": lambda food: f"{food}, fried",
}


class Env(Environment):
    """Cook a dish, step by step; what is done stays in the kitchen's book."""

    tools = [chop, fry]
    max_turns = 4

    def __init__(self) -> None:
        self.book: list[str] = []

    async def step(self, turn: Turn) -> Step:
        if not turn.tool_calls:
            return await super().step(turn)
        answers = []
        for call in turn.tool_calls:
            food = str(call.arguments.get("food", "")) if isinstance(call.arguments, dict) else ""
            done = ACTIONS[call.name](food)
            self.book.append(done)
            answers.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": done})
        return Step(answers)

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.label) in self.book)
