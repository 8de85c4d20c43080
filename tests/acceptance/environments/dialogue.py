from agentrl import Environment, Message, Sample
from agentrl.rm_hub import final_answer


class Env(Environment):
    """Answer as a shop's support would; my conversations come from ShareGPT."""

    max_turns = 1

    async def reset(self, sample: Sample) -> list[Message]:
        conversation = [("system", "You work in a shop."), ("human", str(sample.prompt))]
        return [{"role": who, "content": what} for who, what in conversation]

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.label) in final_answer(sample))
