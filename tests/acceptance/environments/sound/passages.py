"""The task is in the row's metadata; there is no label. Calls for a tool that is not there get an answer of its own."""

from agentrl import Environment, Message, Sample, Step, Turn, tool
from agentrl.rm_hub import final_answer


class Env(Environment):
    """Find the passage that answers a question, and name its number."""

    max_turns = 4

    async def reset(self, sample: Sample) -> list[Message]:
        self.passages: list[str] = sample.metadata["passages"]
        return await super().reset(sample)

    @tool
    async def open(self, number: int) -> str:
        """Read a passage.

        Args:
            number: from 1
        """
        return self.passages[number - 1] if 0 < number <= len(self.passages) else "There is none."

    async def step(self, turn: Turn) -> Step:
        known = {"open"}
        if all(call.name in known for call in turn.tool_calls):
            return await super().step(turn)
        answers: list[Message] = []
        for call in turn.tool_calls:
            text = "There is only: open." if call.name not in known else "Once more, please, on its own."
            answers.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text})
        return Step(answers)

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.metadata["right"]) in final_answer(sample))
