"""The graders by their `--rm-type` names, each imported when it is first used.

1. `boxed_NAME` is grader NAME on the content of the answer's last box.
2. `package.module:function` or `path/file.py:function` names a grader of your own: a `GraderFunction`, which runs as
   the built-in ones do.
3. A grader that reads more than response and label says so in `needs`; what is missing is an error, never a zero.
"""

import difflib
import functools
import importlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from agentrl.errors import AgentRLError, GraderFailure, SettingsError
from agentrl.plugins import load_object
from agentrl.rm_hub.grade import Grade, GraderFunction
from agentrl.rm_hub.reading.boxed import last_box

if TYPE_CHECKING:
    pass

BOXED = "boxed_"
MAX_RESPONSE = 4_000_000
"""Most characters of an answer that is graded."""
MAX_EXTRACTED = 2_000
"""Most characters of `Grade.extracted` and `Grade.reason` that are kept."""


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
        conversation: whether it reads `metadata["messages"]`; else a recorded conversation is not sent to its process.
    """

    path: str
    runs: Literal["process", "async"] = "process"
    reads: Literal["answer", "response"] = "answer"
    needs_label: bool = True
    needs: tuple[str, ...] = ()
    boxable: bool = True
    conversation: bool = False

    def load(self) -> Any:
        """Import the function."""
        if not self.path.startswith("agentrl.rm_hub."):
            return load_object(self.path, what="--rm-type")
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)


_HUB = "agentrl.rm_hub"

GRADERS: Mapping[str, GraderSpec] = {
    "math": GraderSpec(f"{_HUB}.math:grade_math"),
    "dapo": GraderSpec(f"{_HUB}.dapo:grade_dapo", boxable=False),
    "deepscaler": GraderSpec(f"{_HUB}.deepscaler:grade_deepscaler", reads="response", boxable=False),
    "exact_match": GraderSpec(f"{_HUB}.text:grade_exact_match"),
    "f1": GraderSpec(f"{_HUB}.text:grade_f1"),
    "search_r1": GraderSpec(f"{_HUB}.search_r1:grade_search_r1", reads="response", boxable=False, conversation=True),
    "gsm8k": GraderSpec(f"{_HUB}.gsm8k:grade_gsm8k"),
    "gpqa": GraderSpec(f"{_HUB}.gpqa:grade_gpqa"),
    "ifbench": GraderSpec(f"{_HUB}.ifbench:grade_ifbench", needs_label=False),
    "tool_call": GraderSpec(f"{_HUB}.tool_call:grade_tool_call", reads="response", boxable=False, conversation=True),
    "random": GraderSpec(f"{_HUB}.random:grade_random", needs_label=False, boxable=False),
    "code": GraderSpec(f"{_HUB}.code:grade_code", runs="async", needs_label=False, boxable=False),
    "llm_judge": GraderSpec(f"{_HUB}.llm_judge:grade_llm_judge", runs="async", needs_label=False, boxable=False),
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
        PluginError: a grader given by path cannot be found.
    """
    if ":" in rm_type:
        return _by_path(rm_type)
    base = rm_type.removeprefix(BOXED)
    spec = GRADERS.get(base)
    if spec is not None and (base == rm_type or spec.boxable):
        return replace(spec, reads="answer") if base != rm_type else spec
    names = [*GRADERS, *(BOXED + name for name, entry in GRADERS.items() if entry.boxable)]
    close = difflib.get_close_matches(rm_type.lower(), names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(GRADERS)}"
    raise SettingsError(f"--rm-type {rm_type!r}: no such grader; {hint}")


@functools.cache
def _by_path(path: str) -> GraderSpec:
    function = load_object(path, what="--rm-type")
    runs: Literal["process", "async"] = "async" if inspect.iscoroutinefunction(function) else "process"
    return GraderSpec(path, runs=runs, needs_label=False, conversation=True)


def check_inputs(rm_type: str, spec: GraderSpec, response: Any, label: Any, metadata: Any) -> None:
    """Refuse what the grader cannot grade.

    Raises:
        GraderFailure: wrong types, or a label or a field of the metadata is missing.
    """
    if not isinstance(response, str):
        raise _failure("grader_bad_input", rm_type, f": the response must be text, got {type(response).__name__}")
    if len(response) > MAX_RESPONSE:
        most = f"at most {MAX_RESPONSE:,} are graded"
        raise _failure("grader_too_large", rm_type, f": the response has {len(response):,} characters; {most}")
    if not isinstance(metadata, Mapping):
        raise _failure("grader_bad_input", rm_type, f": metadata must be a mapping, got {type(metadata).__name__}")
    if spec.needs_label and label is None:
        raise _failure("grader_no_label", rm_type, " needs a label; set --label-key to the data's field")
    if missing := ", ".join(name for name in spec.needs if name not in metadata):
        where = "put it in the data's metadata field (--metadata-key)"
        raise _failure("grader_no_metadata", rm_type, f" needs metadata {missing}; {where}")


def _failure(kind: str, rm_type: str, what: str) -> GraderFailure:
    return GraderFailure(f"--rm-type {rm_type}{what}", kind=kind)


def apply(rm_type: str, response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """Run a grader of kind "process" here and now; `grade` is its public door.

    Raises:
        SettingsError: no such grader, or one that has to be awaited.
        GraderFailure: the inputs cannot be graded, or the grader raised or returned something else than a grade.
    """
    spec = find(rm_type)
    if spec.runs != "process":
        raise SettingsError(
            f"--rm-type {rm_type} waits for a server or a sandbox; use async_rm in async code, or grade_many"
        )
    check_inputs(rm_type, spec, response, label, metadata)
    function: GraderFunction = spec.load()
    if rm_type.startswith(BOXED):
        boxed = last_box(response)
        if boxed is None:
            return Grade(0.0, False, None, "no box found")
        response = boxed
    try:
        grade = function(response, label, metadata)
    except (AgentRLError, MemoryError):
        raise
    except Exception as error:
        raise _failure("grader_raised", rm_type, f" raised {type(error).__name__}: {error!s:.500}") from error
    return checked(rm_type, grade)


def checked(rm_type: str, grade: object) -> Grade:
    """`grade` if it is one, with finite numbers; its texts cut to a readable length.

    Raises:
        GraderFailure: of kind "grader_bad_grade".
    """
    if not isinstance(grade, Grade):
        raise _failure("grader_bad_grade", rm_type, f" must return a Grade, got {type(grade).__name__}")
    if not all(isinstance(n, (int, float)) and math.isfinite(n) for n in (grade.score, *grade.parts.values())):
        numbers = f"{grade.score!r}, parts {dict(grade.parts)}"
        raise _failure("grader_bad_grade", rm_type, f" gave a score that is not a finite number: {numbers}")
    if len(grade.extracted or "") > MAX_EXTRACTED or len(grade.reason) > MAX_EXTRACTED:
        return replace(grade, extracted=_cut(grade.extracted), reason=_cut(grade.reason) or "")
    return grade


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= MAX_EXTRACTED else text[: MAX_EXTRACTED - 1] + "…"
