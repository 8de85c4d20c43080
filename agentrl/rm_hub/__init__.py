"""Graders: pure functions from an answer and a label to a grade, usable without the trainer.

1. `grade(rm_type, response, label)` grades one answer here; `grade_many` a list on all cores. In async code a
   `GraderRunner` never blocks the event loop.
2. `async_rm(args, sample)` and `batched_async_rm(args, samples)` serve rollouts."""

from typing import Any

from agentrl.rm_hub.grade import Grade as Grade
from agentrl.rm_hub.grade import GraderFunction as GraderFunction
from agentrl.rm_hub.registry import GRADERS as GRADERS
from agentrl.rm_hub.registry import GraderSpec as GraderSpec
from agentrl.rm_hub.registry import check_rm_type as check_rm_type
from agentrl.rm_hub.registry import grade as grade
from agentrl.rm_hub.registry import graders as graders
from agentrl.rm_hub.running.runner import GraderRunner as GraderRunner
from agentrl.rm_hub.running.runner import grade_many as grade_many
from agentrl.rm_hub.sample import async_rm as async_rm
from agentrl.rm_hub.sample import batched_async_rm as batched_async_rm
from agentrl.rm_hub.sample import final_answer as final_answer
from agentrl.rm_hub.sample import rm_type_of as rm_type_of
from agentrl.rm_hub.settings import RmHubSettings as RmHubSettings


def math_verify_reward(response: str, label: Any) -> float:
    """1.0 if the answer is mathematically equal to the label, else 0.0: the score of `grade("math", ...)`."""
    return grade("math", response, label).score
