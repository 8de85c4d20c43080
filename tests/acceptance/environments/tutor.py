# mypy: ignore-errors
from agentrl import Environment, Message, Sample
from agentrl.rm_hub import final_answer


class Env(Environment):
    """Questions from a chat data set, under a system message that says how to answer."""

    max_turns = 1

    async def reset(self, sample: Sample) -> list[Message]:
        sample.prompt.insert(0, {"role": "system", "content": "You are a tutor. Answer in one word."})
        return sample.prompt

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.label) in final_answer(sample))
