from agentrl import Environment, Message, Sample
from agentrl.rm_hub import final_answer

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class Env(Environment):
    """Read a number off a chart."""

    max_turns = 1

    async def reset(self, sample: Sample) -> list[Message]:
        chart = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        return [{"role": "user", "content": [chart, {"type": "text", "text": str(sample.prompt)}]}]

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.label) in final_answer(sample))
