from agentrl import Environment, Step, Turn


class Env(Environment):
    """One question, one answer: a point if it is right."""

    max_turns = 1

    async def step(self, turn: Turn) -> Step:
        if str(turn.sample.label).lower() in turn.content.lower():
            return Step(done=True, reward=1.0)
        return Step(done=True)
