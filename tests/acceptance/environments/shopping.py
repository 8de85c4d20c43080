from agentrl import Environment, Sample, tool


class Env(Environment):
    """Buy what is on the list, and nothing else."""

    max_turns = 4
    basket: list[str] = []

    @tool
    async def buy(self, thing: str) -> str:
        """Put something into the basket.

        Args:
            thing: what to buy
        """
        self.basket.append(thing)
        return f"In the basket: {', '.join(self.basket)}."

    async def reward(self, sample: Sample) -> float:
        return float(set(self.basket) == set(str(sample.label).split()))
