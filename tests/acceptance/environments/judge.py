from agentrl import Environment, Message, Sample, Step, Turn


class Env(Environment):
    """Decide whether a sentence is true. The model may think aloud for a turn, so all that was said is looked at."""

    max_turns = 2

    async def reset(self, sample: Sample) -> list[Message]:
        self.said = f"{sample.prompt} Answer with yes or no."
        return [{"role": "user", "content": self.said}]

    async def step(self, turn: Turn) -> Step:
        self.said += "\n" + turn.content
        if turn.index == 2:
            return Step(done=True)
        return Step([{"role": "user", "content": "So, what is it?"}])

    async def reward(self, sample: Sample) -> float:
        return 1.0 if str(sample.label) in self.said else 0.0
