"""`Check`, a kind of constraint, and `Constraint`, a constraint of a prompt with its parameters from the data.

1. A check is a function of a passage and parameters. It returns faults: short texts of what was found instead of what
   the constraint requires. Without faults the constraint is met. Only the first fault is read.
2. Parameters come from JSON, where a number may be a float and an absent field null. A name has the same meaning in
   every kind. A wrong parameter is an error in the data: a `GraderFailure`, never a zero for the answer."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from agentrl.rm_hub.ifbench.passage import ResponseText
from agentrl.rm_hub.reading.common import bad_metadata, clip

Faults = Iterable[str]
Run = Callable[..., Faults]  # called with the passage, and with the parameters by name


class Reader(NamedTuple):
    """The conversion of a value in the data to a parameter: the expected value in words, a test, and the conversion."""

    expected: str
    fits: Callable[[Any], bool]
    read: Callable[[Any], Any]


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Return true if the value is a list, or an array, which Parquet gives for a list."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, (str, bytes, Mapping))


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


WHOLE = Reader("a whole number from 0 on", lambda value: _number(value) and 0 <= value == value // 1, int)
COUNTED = Reader("a whole number from 1 on", lambda value: _number(value) and 1 <= value == value // 1, int)
_SHARE = Reader("a percentage from 0 to 100", lambda value: _number(value) and 0 <= value <= 100, float)
_TEXT = Reader("a text that is not blank", _text, str)
_TRIMMED = _TEXT._replace(read=str.strip)
_TEXTS = Reader("a list of texts", lambda value: is_list(value) and len(value) > 0 and all(map(_text, value)), tuple)
_SIGN = Reader("one character", lambda v: _text(v) and len(v.strip()) == 1, lambda v: v.strip().lower())
_RELATION = Reader("'less than' or 'at least'", lambda value: value in ("less than", "at least"), str)

_NAMES = {
    WHOLE: """N small_n min_words max_words n_start n_end frequency let_frequency capital_frequency num_sentences
        num_paragraphs num_words num_placeholders num_bullets num_highlights num_sections""",
    COUNTED: "n m nth_paragraph",
    _SHARE: "percentage",
    _TEXT: "word options sep prompt_to_repeat reference_text",
    _TRIMMED: """keyword keyword1 keyword2 keyword3 keyword4 keyword5 language first_word postscript_marker
        section_spliter end_phrase""",
    _TEXTS: "keywords forbidden_words",
    _SIGN: "letter",
    _RELATION: "relation let_relation capital_relation",
}
PARAMETERS = {name: reader for reader, names in _NAMES.items() for name in names.split()}
"""The reader of each parameter that the data may give, by name."""


class Check(NamedTuple):
    """One kind of constraint."""

    says: str  # the constraint in words, with the parameters in braces
    run: Run
    needs: Mapping[str, Reader]  # the parameters it takes, each with its reader


def check(says: str, run: Run, counted: str) -> Check:
    """Make a check from a function of a passage. Its parameters are read by `PARAMETERS`, but `counted` by `COUNTED`."""
    _, *names = inspect.signature(run).parameters
    return Check(says, run, {name: COUNTED if name == counted else PARAMETERS[name] for name in names})


def compare(got: int, how: str, want: int, what: str) -> Faults:
    """Return a fault if `got` is not "less than", "at least" or "exactly" `want`."""
    met = got < want if how == "less than" else got >= want if how == "at least" else got == want
    return unless(met, f"{got} {what}")


def unless(met: object, fault: str = "") -> Faults:
    """Return a fault if a condition does not hold. By default the fault adds no text to the constraint."""
    return () if met else (fault,)


class Constraint(NamedTuple):
    """One constraint of a prompt: a kind, its check, and the parameters that were given."""

    kind: str
    check: Check
    given: Mapping[str, Any]

    def fault(self, passage: ResponseText) -> str | None:
        """Return the first fault, or None if the constraint is met. A blank answer meets no constraint."""
        faults = self.check.run(passage, **self.given) if passage.raw.strip() else ("an empty answer",)
        return next((clip(fault, 80) for fault in faults), None)

    def __str__(self) -> str:
        says = self.check.says.format(**{name: clip(str(value), 80) for name, value in self.given.items()})
        return f"{says} ({self.kind})"


def constrain(kind: str, check: Check, given: Mapping[str, Any]) -> Constraint:
    """Make a constraint with its parameters from one entry of `kwargs`. Fields of other kinds are ignored. Raises
    GraderFailure (`grader_bad_metadata`): a parameter is missing or has a wrong value."""
    for name, reader in check.needs.items():
        if given.get(name) is None:
            raise bad_metadata("ifbench", "kwargs", f"{', '.join(check.needs)} for {kind}; {name} missing", given)
        if not reader.fits(given[name]):
            raise bad_metadata("ifbench", f"kwargs {name} of {kind}", reader.expected, given[name])
    return Constraint(kind, check, {name: reader.read(given[name]) for name, reader in check.needs.items()})
