# mypy: ignore-errors
from agentrl import Environment, Sample, Step, Turn, tool
from agentrl.rm_hub import final_answer


@tool
def add(numbers: list[int]) -> int:
    """Add up numbers.

    Args:
        numbers: what to add
    """
    return sum(numbers)


class Env(Environment):
    """Say what several dice show together; a calculator helps, and every call of it costs something."""

    tools = [add]
    max_turns = 4
    calls = 0

    async def step(self, turn: Turn):
        answer = None
        if turn.tool_calls:
            self.calls += len(turn.tool_calls)
            await self.run_tools(turn)
        else:
            answer = Step(done=True)
        return answer

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.label) in final_answer(sample)) - 0.1 * self.calls
