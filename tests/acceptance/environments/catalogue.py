# mypy: ignore-errors
from agentrl import Environment, Sample, tool
from agentrl.rm_hub import final_answer


class Lamp:
    def __init__(self, name: str, price: int) -> None:
        self.name = name
        self.price = price


LAMPS = [Lamp("Solen", 30), Lamp("Maane", 45)]


@tool
def cheapest(below: int):
    """The cheapest lamp of the shop.

    Args:
        below: what it may cost
    """
    return min(LAMPS, key=lambda lamp: lamp.price)


class Env(Environment):
    """Recommend a lamp from the shop's list."""

    tools = [cheapest]
    max_turns = 3

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.label) in final_answer(sample))
