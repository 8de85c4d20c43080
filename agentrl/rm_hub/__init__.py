"""Graders: pure functions from an answer and a label to a score, usable without the trainer.

`grade(rm_type, response, label)` looks a grader up by name; `async_rm(args, sample)` is what the rollout loop calls.
"""

from agentrl.rm_hub.registry import async_rm, check_rm_type, final_answer, grade, graders

__all__ = ["async_rm", "check_rm_type", "final_answer", "grade", "graders"]
