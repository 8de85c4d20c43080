"""The graders by their `--rm-type` names, each imported when it is first used.

1. `boxed_NAME` is grader NAME on the content of the answer's last box.
2. A grader that reads more than response and label says so in `needs`; what is missing is an error, never a zero.
"""

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentrl.errors import GraderFailure, SettingsError
from agentrl.rm_hub.grade import Grade, GraderFunction

BOXED = "boxed_"


@dataclass(frozen=True, slots=True)
class GraderSpec:
    """How one grader is found and run.

    Attributes:
        path: `module:function`; a `GraderFunction`, or a coroutine function of the same form where `runs` is "async".
        runs: "process" for pure functions (in a worker process with a deadline), "async" for those that wait for
            something else (a server, the sandbox).
        reads: which text of a sample is graded: its final answer, or its whole response.
        needs_label: whether a label is required.
        needs: fields of the metadata that must be there.
        boxable: whether `boxed_NAME` exists.
    """

    path: str
    runs: Literal["process", "async"] = "process"
    reads: Literal["answer", "response"] = "answer"
    needs_label: bool = True
    needs: tuple[str, ...] = ()
    boxable: bool = True

    def load(self) -> Any:
        """Import the function."""
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)


_HUB = "agentrl.rm_hub"

GRADERS: Mapping[str, GraderSpec] = {
    "exact_match": GraderSpec(f"{_HUB}.text:grade_exact_match"),
    "f1": GraderSpec(f"{_HUB}.text:grade_f1"),
    "remote_rm": GraderSpec(
        f"{_HUB}.remote_rm:grade_remote_rm", runs="async", reads="response", needs_label=False, boxable=False
    ),
}


def graders() -> tuple[str, ...]:
    """The names that `--rm-type` accepts, without the `boxed_` forms."""
    return tuple(GRADERS)


def find(rm_type: str) -> GraderSpec:
    """The grader of that name; a `boxed_` form has its base's spec.

    Raises:
        SettingsError: no such grader (with the nearest name).
    """
    base = rm_type.removeprefix(BOXED)
    spec = GRADERS.get(base)
    if spec is not None and (base == rm_type or spec.boxable):
        return replace(spec, reads="answer") if base != rm_type else spec
    names = [*GRADERS, *(BOXED + name for name, entry in GRADERS.items() if entry.boxable)]
    close = difflib.get_close_matches(rm_type, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(GRADERS)}"
    raise SettingsError(f"--rm-type {rm_type!r}: no such grader; {hint}")


def check_rm_type(rm_type: str) -> None:
    """Refuse a name that `grade` does not know.

    Raises:
        SettingsError: no such grader (with the nearest name).
    """
    find(rm_type)


def check_inputs(rm_type: str, spec: GraderSpec, response: Any, label: Any, metadata: Any) -> None:
    """Refuse what the grader cannot grade.

    Raises:
        GraderFailure: wrong types, or a label or a field of the metadata is missing.
    """
    if not isinstance(response, str):
        raise GraderFailure(
            f"--rm-type {rm_type}: the response must be text, got {type(response).__name__}", kind="grader_bad_input"
        )
    if not isinstance(metadata, Mapping):
        raise GraderFailure(
            f"--rm-type {rm_type}: metadata must be a mapping, got {type(metadata).__name__}", kind="grader_bad_input"
        )
    if spec.needs_label and label is None:
        raise GraderFailure(
            f"--rm-type {rm_type} needs a label; set --label-key to the data's field", kind="grader_no_label"
        )
    missing = [name for name in spec.needs if name not in metadata]
    if missing:
        raise GraderFailure(
            f"--rm-type {rm_type} needs metadata {', '.join(missing)}; put it in the data's metadata field "
            "(--metadata-key)",
            kind="grader_no_metadata",
        )


def apply(rm_type: str, response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """Run a grader of kind "process" here and now; `grade` is its public door."""
    spec = find(rm_type)
    check_inputs(rm_type, spec, response, label, metadata)
    function: GraderFunction = spec.load()
    if rm_type.startswith(BOXED):
        from agentrl.rm_hub.boxed import last_box

        boxed = last_box(response)
        if boxed is None:
            return Grade(0.0, False, None, "no box found")
        response = boxed
    return function(response, label, metadata)
