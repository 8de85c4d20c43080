# mypy: ignore-errors
import operator

from agentrl import Environment, Sample, Step, Turn, tool
from agentrl.rm_hub import final_answer

OPERATIONS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}


@tool
def calculate(operation: str, a: float, b: float) -> str:
    """Calculate with two numbers.

    Args:
        operation: add, subtract or multiply
        a: the first number
        b: the second number
    """
    return str(OPERATIONS[operation](a, b)) if operation in OPERATIONS else "I cannot do that."


class Env(Environment):
    """Solve a sum with a calculator, one call a turn: a second one in the same turn is not looked at."""

    tools = [calculate]
    max_turns = 3

    async def step(self, turn: Turn) -> Step:
        if "<tool_call>" not in turn.text:
            return Step(done=True)
        call = turn.tool_calls[0]
        numbers = {"a": call.arguments["a"], "b": call.arguments["b"]}
        operation = OPERATIONS.get(call.arguments["operation"])
        result = str(operation(**numbers)) if operation else "I cannot do that."
        return Step([{"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result}])

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.label) in final_answer(sample))
