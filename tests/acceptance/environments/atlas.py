import time

from agentrl import Environment, Sample, Step, Turn
from agentrl.rm_hub import final_answer

RIVERS = {"Oslo": "Akerselva", "Paris": "Seine", "Vienna": "Danube"}


def ask_server(city: str) -> str:
    """The river of a city; the server allows two questions a second."""
    time.sleep(0.5)
    return RIVERS.get(city, "unknown")


class Env(Environment):
    """The model writes "ask: CITY" to learn a river from our server, and at last the answer."""

    max_turns = 3

    async def step(self, turn: Turn) -> Step:
        city = turn.content.removeprefix("ask:").strip()
        river = ask_server(city)
        if not turn.content.startswith("ask:"):
            return Step(done=True)
        return Step([{"role": "user", "content": f"The river is: {river}"}])

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.label) in final_answer(sample))
