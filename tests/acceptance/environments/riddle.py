from agentrl import Environment, Message, Sample
from agentrl.rm_hub import final_answer


class Env(Environment):
    """Solve a riddle; the model's answer should begin with "It is", so I begin it."""

    max_turns = 1

    async def reset(self, sample: Sample) -> list[Message]:
        question = await super().reset(sample)
        return [*question, {"role": "assistant", "content": "It is"}]

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.label) in final_answer(sample))
