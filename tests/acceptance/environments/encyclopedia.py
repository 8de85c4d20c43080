from agentrl import Environment, Sample, Step, Turn, tool
from agentrl.rm_hub import final_answer

ARTICLES = {"Oslo": "Oslo is the capital of Norway.", "Lima": "Lima is the capital of Peru."}


@tool
def read(title: str) -> str:
    """Read an article.

    Args:
        title: of the article
    """
    return ARTICLES.get(title, "no such article")


class Env(Environment):
    """Answer questions from an encyclopedia; I answer the calls myself, to log them."""

    tools = [read]
    max_turns = 3

    def __init__(self) -> None:
        self.log: list[str] = []

    async def step(self, turn: Turn) -> Step:
        if not turn.tool_calls:
            return await super().step(turn)
        results = []
        for call in turn.tool_calls:
            title = call.arguments.get("title", "") if isinstance(call.arguments, dict) else ""
            self.log.append(title)
            results.append({"role": "tool", "content": ARTICLES.get(title, "no such article")})
        return Step(results)

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.label) in final_answer(sample))
