"""The graders by `--rm-type` name, each imported on first use. `boxed_NAME` grades the content of the last box.
`package.module:function` or `path/file.py:function` names a user's grader. A missing label is an error, never a zero.
If an answer exhausts a built-in grader's time, memory or stack, it gets a wrong answer's score. With an error, the
answer could drop its group. A user's grader raises the error."""

import difflib
import functools
import inspect
import math
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

from agentrl.errors import AgentRLError, GraderFailure, SettingsError, install
from agentrl.files import read_table
from agentrl.plugins import load_object, raised_at
from agentrl.rm_hub.grade import Grade, GraderFunction, Metadata
from agentrl.rm_hub.reading.common import after_reasoning, clip, last_box
from agentrl.rm_hub.settings import RmHubSettings

BOXED = "boxed_"
MAX_RESPONSE = 4_000_000  # maximum characters of a graded answer
MAX_EXTRACTED = 2_000  # `Grade.extracted` and `Grade.reason` are truncated to this many characters


@dataclass(frozen=True, slots=True)
class GraderSpec:
    """One grader: its name, its function and its options."""

    path: str  # `module:name` of the object; `runs` is its type
    packages: tuple[str, ...] = ()  # required ones: of the extra `graders`, or the grader's own
    runs: Literal["process", "service", "async"] = "process"
    """A `GraderFunction` in a worker process, a `GraderService`, or an async `GraderFunction`."""
    reads: Literal["answer", "response"] = "answer"  # graded text of a sample: final answer or whole response
    needs_label: bool = True
    boxable: bool = True  # `boxed_NAME` exists
    conversation: bool = False  # reads `metadata["messages"]`; processes of other graders do not get them
    zero: float | None = 0.0  # score of an answer that exhausts the grader; None: raise the failure

    def load(self) -> Any:
        """Import and return the function, or the class of a service."""
        ours = self.path.startswith(f"{_HUB}.")
        return pkgutil.resolve_name(self.path) if ours else load_object(self.path, what="--rm-type")


_HUB = "agentrl.rm_hub"

_ROWS: list[list[Any]] = read_table(__file__, "graders.tsv")
GRADERS: Mapping[str, GraderSpec] = {
    name: GraderSpec(
        path, tuple(packages.split()), runs, reads, label == "yes", box == "yes", talk == "yes", float(zero)
    )
    for name, path, packages, runs, reads, label, box, talk, zero in _ROWS
}


def graders() -> tuple[str, ...]:
    """Return the names that `--rm-type` accepts, without the `boxed_` forms."""
    return tuple(GRADERS)


def find(rm_type: str) -> GraderSpec:
    """Return the spec. Raises SettingsError, PluginError: the name is unknown."""
    if ":" in rm_type:
        return _by_path(rm_type)
    base = rm_type.removeprefix(BOXED)
    if (spec := GRADERS.get(base)) is not None and (base == rm_type or spec.boxable):
        return spec
    names = [*GRADERS, *(BOXED + name for name, entry in GRADERS.items() if entry.boxable)]
    close = difflib.get_close_matches(rm_type.lower(), names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(GRADERS)}"
    raise SettingsError(f"--rm-type {rm_type!r}: no such grader; {hint}")


@functools.cache
def _by_path(path: str) -> GraderSpec:
    function = load_object(path, what="--rm-type")
    runs: Literal["process", "async"] = "async" if inspect.iscoroutinefunction(function) else "process"
    return GraderSpec(path, runs=runs, needs_label=False, conversation=True, zero=None)


def check_inputs(rm_type: str, spec: GraderSpec, response: Any, label: Any, metadata: Any) -> Grade | None:
    """Return a too long answer's grade, else None. Raises GraderFailure: a type is wrong, or the label is missing."""
    if not isinstance(response, str):
        raise _failure("grader_bad_input", rm_type, f": the response must be text, got {type(response).__name__}")
    if not isinstance(metadata, Mapping):
        raise _failure("grader_bad_input", rm_type, f": metadata must be a mapping, got {type(metadata).__name__}")
    if spec.needs_label and label is None:
        remedy = "pass it, or name the field of the data that holds it (--label-key)"
        raise _failure("grader_no_label", rm_type, f" needs a label, and there is none; {remedy}")
    if len(response) > MAX_RESPONSE:
        what = f": the response has {len(response):,} characters; at most {MAX_RESPONSE:,} are graded"
        return exhausted(spec, _failure("grader_too_large", rm_type, what))
    return None


def _failure(kind: str, rm_type: str, what: str) -> GraderFailure:
    return GraderFailure(f"--rm-type {rm_type}{what}", kind=kind)


def grade(rm_type: str, response: str, label: Any = None, metadata: Metadata | None = None) -> Grade:
    """Grade one answer, in this process and without a deadline. `rm_type` is a NAME of `graders()`, `boxed_NAME`, or
    `path/to/file.py:function`. `label` is the accepted answer or a list. Some graders need `metadata`. Raises
    SettingsError: the grader is unknown, or must be awaited. GraderFailure: the label or a field of the metadata is
    missing or has the wrong type, or the grader raised an exception."""
    spec, metadata = find(rm_type), {} if metadata is None else metadata
    if spec.runs != "process":
        otherwise = "use async_rm in async code, or grade_many"
        raise SettingsError(f"--rm-type {rm_type} waits for a server or a sandbox; {otherwise}")
    if (too_long := check_inputs(rm_type, spec, response, label, metadata)) is not None:
        return too_long
    function: GraderFunction = spec.load()
    if rm_type.startswith(BOXED):
        if (boxed := last_box(after_reasoning(response))) is None:
            return Grade(spec.zero or 0.0, False, None, "no box found", unjudged="no_box")
        response = boxed
    try:
        given = function(response, label, metadata)
    except (AgentRLError, MemoryError):
        raise
    except RecursionError as error:
        return exhausted(spec, _failure("grader_crashed", rm_type, f" raised RecursionError: {error!s:.500}"))
    except Exception as error:
        raise raised(rm_type, error) from error
    return checked(rm_type, given)


def raised(rm_type: str, error: Exception) -> GraderFailure:
    """Return the failure for an exception that a grader raised, with its place in the grader's code."""
    ours = isinstance(error, ModuleNotFoundError) and error.name in (*find(rm_type).packages, "math_verify")
    advice = f"; {install('graders')}" if ours else ""
    said = f" raised {type(error).__name__}: {error!s:.500}{raised_at(error)}{advice}"
    return _failure("grader_raised", rm_type, said)


def exhausted(spec: GraderSpec, failure: GraderFailure) -> Grade:
    """Return the grade of an answer that exceeded a limit. Raises `failure`: the grader is a user's."""
    if spec.zero is None:
        raise failure
    return Grade(spec.zero, False, None, str(failure), unjudged=failure.kind)


def check_rm_type(rm_type: str, settings: RmHubSettings | None = None) -> GraderSpec:
    """Return the spec of a usable grader. Raises ModuleNotFoundError: a required package is missing. SettingsError: the
    name is unknown, or `settings` lack a value that the grader needs (`--rm-url`, ...)."""
    spec = find(rm_type)
    for name in spec.packages:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if settings is not None and spec.runs == "service":
        spec.load()(settings)  # raises if a setting is missing
    return spec


def checked(rm_type: str, grade: object) -> Grade:
    """Truncate the texts. Raises GraderFailure (`grader_bad_grade`): no Grade, a number that is not finite, or no text."""
    if not isinstance(grade, Grade):
        raise _failure("grader_bad_grade", rm_type, f" must return a Grade, got {type(grade).__name__}")
    if not all(isinstance(n, (int, float)) and math.isfinite(n) for n in (grade.score, *grade.parts.values())):
        numbers = f"{grade.score!r}, parts {dict(grade.parts)}"
        raise _failure("grader_bad_grade", rm_type, f" gave a score that is not a finite number: {numbers}")
    if not isinstance(grade.reason, str) or not isinstance(grade.extracted, str | None):
        raise _failure("grader_bad_grade", rm_type, f" gave a reason or an extract that is no text: {grade!r:.300}")
    extracted = grade.extracted and clip(grade.extracted, MAX_EXTRACTED)
    return replace(grade, correct=bool(grade.correct), extracted=extracted, reason=clip(grade.reason, MAX_EXTRACTED))
