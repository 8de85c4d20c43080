# mypy: ignore-errors
from agentrl import Environment, Sample, tool
from agentrl.rm_hub import final_answer

PEOPLE = {("Oslo", 2024): 724_290, ("Oslo", 2004): 522_000}


@tool
def count_people(city: str, year) -> str:
    """How many people live in a city.

    Args:
        city: its English name
        year: of the count
    """
    return str(PEOPLE.get((city, int(year)), "not known"))


class Env(Environment):
    """Say how many people lived in a city in some year."""

    tools = [count_people]
    max_turns = 3

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.label) in final_answer(sample))
