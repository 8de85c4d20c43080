"""A reward for one evaluation set: true if the calculator was called before the answer, right or wrong."""

from typing import Any

from agentrl import Sample
from agentrl.demo.task import final_text


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Return 1.0 for an answer in its tags after a call that worked, else 0.0."""
    asked = sample.metadata.get("counters", {}).get("tool_ok", 0) > 0
    return float(asked and final_text(sample).startswith("<answer>"))
