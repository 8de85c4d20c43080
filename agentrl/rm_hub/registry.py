"""Looking up a grader by its `--rm-type` name, and applying it to a sample."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.errors import GraderFailure, SettingsError
from agentrl.rm_hub.text import exact_match, f1
from agentrl.sample import Sample

Grader = Callable[[str, Any], float]

_GRADERS: Mapping[str, Grader] = {"exact_match": exact_match, "f1": f1}


def graders() -> tuple[str, ...]:
    """The names that `--rm-type` accepts."""
    return tuple(_GRADERS)


def grade(rm_type: str, response: str, label: Any) -> float:
    """Score `response` against `label`.

    Args:
        rm_type: a name of `graders()`.
        response: the model's answer.
        label: the accepted answer, or a list of them.

    Raises:
        SettingsError: no such grader (with the nearest name).
        GraderFailure: the label is missing.
    """
    check_rm_type(rm_type)
    if label is None:
        raise GraderFailure(
            f"--rm-type {rm_type} needs a label; set --label-key to the data's field", kind="grader_no_label"
        )
    return _GRADERS[rm_type](response, label)


def check_rm_type(rm_type: str) -> None:
    """Refuse a name that `grade` does not know.

    Raises:
        SettingsError: no such grader (with the nearest name).
    """
    if rm_type not in _GRADERS:
        close = difflib.get_close_matches(rm_type, _GRADERS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(_GRADERS)}"
        raise SettingsError(f"--rm-type {rm_type!r}: no such grader; {hint}")


async def async_rm(args: Any, sample: Sample) -> float:
    """The built-in reward of a sample: its own `metadata["rm_type"]` or `args.rm_type`, on its final answer and label."""
    rm_type = sample.metadata.get("rm_type") or getattr(args, "rm_type", None)
    if not rm_type:
        raise SettingsError("no grader is set; pass --rm-type, one of " + ", ".join(_GRADERS))
    return grade(rm_type, final_answer(sample), sample.label)


def final_answer(sample: Sample) -> str:
    """The text to grade: the last assistant message where the conversation was recorded, else the response."""
    for message in reversed(sample.metadata.get("messages", ())):
        if message.get("role") == "assistant":
            return str(message.get("content") or "")
    return sample.response
