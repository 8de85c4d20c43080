"""No tools, no end of its own unless the word is found: most trajectories end with the last turn."""

from agentrl import Environment, Message, Sample, Step, Turn


class Env(Environment):
    """Guess a word; the answers are yes and no."""

    max_turns = 4

    async def reset(self, sample: Sample) -> list[Message]:
        self.word = str(sample.label)
        return [
            {"role": "system", "content": "Ask, and you are told yes or no. Say the word when you know it."},
            {"role": "user", "content": f"I think of a word with {len(self.word)} letters."},
        ]

    async def step(self, turn: Turn) -> Step:
        if self.word in turn.content:
            return Step(done=True)
        shared = set(turn.content.lower()) & set(self.word)
        return Step([{"role": "user", "content": "Yes." if len(shared) > 2 else "No."}])

    async def reward(self, sample: Sample) -> float:
        return float(self.word in sample.response)
