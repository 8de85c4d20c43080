# mypy: ignore-errors
from agentrl import Environment, Sample
from agentrl.rm_hub import final_answer


class Env(Environment):
    """Write a polite letter: it must say please and thank you."""

    max_turns = 1

    async def reward(self, sample: Sample):
        letter = final_answer(sample).lower()
        return "good" if "please" in letter and "thank you" in letter else "bad"
