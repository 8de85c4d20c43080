"""Graders: pure functions from an answer and a label to a grade, usable without the trainer.

`grade(rm_type, response, label)` looks a grader up by name; `async_rm(args, sample)` is what the rollout loop calls.
"""

from collections.abc import Mapping
from typing import Any

from agentrl.rm_hub.grade import Grade, GraderFunction
from agentrl.rm_hub.registry import apply, check_rm_type, graders
from agentrl.rm_hub.sample import async_rm, final_answer

__all__ = ["Grade", "GraderFunction", "async_rm", "check_rm_type", "final_answer", "grade", "graders"]


def grade(rm_type: str, response: str, label: Any = None, metadata: Mapping[str, Any] | None = None) -> Grade:
    """Grade one answer, in this process and without a deadline.

    Args:
        rm_type: a name of `graders()`, or `boxed_` and such a name.
        response: the model's answer.
        label: the accepted answer, or a list of them.
        metadata: what some graders need besides.

    Raises:
        SettingsError: no such grader (with the nearest name).
        GraderFailure: the label or a field of the metadata is missing or of the wrong type.
    """
    return apply(rm_type, response, label, metadata or {})
