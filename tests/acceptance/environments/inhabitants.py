from agentrl import Environment, Sample, tool
from agentrl.rm_hub import final_answer

PEOPLE = {"Oslo": 724_290, "Paris": 2_133_111}


@tool
def inhabitants(city: str, thousands: bool = False) -> str:
    """How many people live in a city.

    Args:
        town: its English name
        thousands: whether to round to thousands
    """
    if city not in PEOPLE:
        return "not known"
    return f"{PEOPLE[city] // 1000} thousand" if thousands else str(PEOPLE[city])


class Env(Environment):
    """Say how many people live in a city."""

    tools = [inhabitants]
    max_turns = 3

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.label) in final_answer(sample))
