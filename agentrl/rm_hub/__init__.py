"""Graders: functions from an answer and a label to a grade, usable without the trainer.

1. `grade(rm_type, response, label)` grades one answer in this process. `grade_many` grades a list in worker processes.
   In async code, use a `GraderRunner`: it does not block the event loop.
2. `async_rm(args, sample)` and `batched_async_rm(args, samples)` serve rollouts."""

from typing import Any

from agentrl.rm_hub.grade import Grade, GraderFunction
from agentrl.rm_hub.registry import GRADERS, GraderSpec, check_rm_type, grade, graders
from agentrl.rm_hub.running.runner import GraderRunner, grade_many
from agentrl.rm_hub.sample import async_rm, batched_async_rm, final_answer, rm_type_of
from agentrl.rm_hub.settings import RmHubSettings

__all__ = ["GRADERS", "Grade", "GraderFunction", "GraderRunner", "GraderSpec", "RmHubSettings", "async_rm"]
__all__ += ["batched_async_rm", "check_rm_type", "final_answer", "grade", "grade_many", "graders", "math_verify_reward"]
__all__ += ["rm_type_of"]


def math_verify_reward(response: str, label: Any) -> float:
    """Return 1.0 if the answer is mathematically equal to the label, else 0.0: the score of `grade("math", ...)`."""
    return grade("math", response, label).score
