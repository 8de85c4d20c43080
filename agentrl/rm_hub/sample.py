"""Grading a rollout's samples: which text of a sample is graded, by which grader."""

from typing import Any

from agentrl.errors import SettingsError
from agentrl.rm_hub.registry import GRADERS, apply, find
from agentrl.sample import Sample


async def async_rm(args: Any, sample: Sample) -> float:
    """The built-in reward of a sample: its own `metadata["rm_type"]` or `args.rm_type`, on its final answer and label."""
    rm_type = sample.metadata.get("rm_type") or getattr(args, "rm_type", None)
    if not rm_type:
        raise SettingsError("no grader is set; pass --rm-type, one of " + ", ".join(GRADERS))
    text = final_answer(sample) if find(rm_type).reads == "answer" else sample.response
    return apply(rm_type, text, sample.label, sample.metadata).score


def final_answer(sample: Sample) -> str:
    """The text to grade: the last assistant message where the conversation was recorded, else the response."""
    for message in reversed(sample.metadata.get("messages", ())):
        if message.get("role") == "assistant":
            return str(message.get("content") or "")
    return sample.response
