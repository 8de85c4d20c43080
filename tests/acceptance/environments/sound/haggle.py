"""It ends in its own step, and steps' rewards are all it gives: there is no reward method and no grader."""

import re

from agentrl import Environment, Message, Sample, Step, Turn


class Env(Environment):
    """Sell a bicycle: the buyer takes any price up to a limit, and loses patience."""

    max_turns = 6

    async def reset(self, sample: Sample) -> list[Message]:
        self.limit = 60 + 10 * len(str(sample.prompt)) % 50
        return [{"role": "user", "content": "What do you want for the bicycle?"}]

    async def step(self, turn: Turn) -> Step:
        price = re.search(r"\d+", turn.content)
        if price and int(price[0]) <= self.limit:
            return Step(done=True, reward=int(price[0]) / 100)
        if turn.index == 3:
            return Step([{"role": "user", "content": "No deal."}], done=True, reward=-0.5)
        return Step([{"role": "user", "content": "Too much." if price else "A number, please."}], reward=-0.1)
