"""`Check`: one kind of constraint, and `Constraint`: one of a prompt, with its parameters read from the data.

1. A check is a pure function of a passage and its parameters. It answers None if the constraint is met, else what was
   found instead, in a few words.
2. Parameters come from JSON, where every number may be a float and every absent field a null. What cannot be the
   parameter is the data's fault: a `GraderFailure`, never a refusal of the answer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

from agentrl.errors import GraderFailure
from agentrl.rm_hub.ifbench.passage import Passage

Finding = str | None
"""None: the constraint is met. Else what was found instead, for people."""

Reader = Callable[[Any], Any]
"""Turns a value of the data into a parameter; raises ValueError with what was expected."""

Run = TypeVar("Run", bound=Callable[..., Finding])


class Check(NamedTuple):
    """One kind of constraint.

    Attributes:
        run: the check itself, called with the passage and the parameters by name.
        says: the constraint in words, with the parameters in braces.
        needs: the parameters it takes, each with its reader.
    """

    run: Callable[..., Finding]
    says: str
    needs: Mapping[str, Reader]


CHECKS: dict[str, Check] = {}
"""Every kind by the id that the data uses; the modules of checks fill it."""


def constraint(kind: str, says: str) -> Callable[[Run], Run]:
    """Make a function the check of a kind; its parameters after the passage are annotated with their readers."""

    def noted(run: Run) -> Run:
        hints = get_type_hints(run, include_extras=True)
        needs = {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}
        CHECKS[kind] = Check(run, says, needs)
        return run

    return noted


class Constraint:
    """One constraint of a prompt: a kind and its parameters, read out of one entry of `kwargs`.

    Fields of the entry that belong to other kinds are left alone.

    Raises:
        GraderFailure: `grader_bad_metadata`, if a parameter is missing or cannot be read.
    """

    def __init__(self, kind: str, check: Check, given: Mapping[str, Any]) -> None:
        self.kind, self.check = kind, check
        missing = [name for name in check.needs if given.get(name) is None]
        if missing:
            raise GraderFailure(
                f"constraint {kind!r} needs kwargs {', '.join(check.needs)}; "
                f"{', '.join(missing)} missing or null in {_short(given)}",
                kind="grader_bad_metadata",
            )
        self.given: dict[str, Any] = {}
        for name, read in check.needs.items():
            try:
                self.given[name] = read(given[name])
            except ValueError as error:
                raise GraderFailure(
                    f"constraint {kind!r}: kwargs {name} must be {error}, got {_short(given[name])}",
                    kind="grader_bad_metadata",
                ) from None

    def finding(self, passage: Passage) -> Finding:
        """Run the check; an answer of white space meets no constraint."""
        return self.check.run(passage, **self.given) if passage.raw.strip() else "an empty answer"

    def __str__(self) -> str:
        says = self.check.says.format(**{name: _short(value) for name, value in self.given.items()})
        return f"{says} ({self.kind})"


def whole(value: Any) -> int:
    """A whole number from 0 on; 5.0 is one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != value // 1:
        raise ValueError("a whole number from 0 on")
    return int(value)


def counted(value: Any) -> int:
    """A whole number from 1 on."""
    if whole(value) < 1:
        raise ValueError("a whole number from 1 on")
    return int(value)


def share(value: Any) -> float:
    """A percentage, 0 to 100."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 100:
        raise ValueError("a percentage from 0 to 100")
    return float(value)


def text(value: Any) -> str:
    """A text that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text that is not blank")
    return value


def trimmed(value: Any) -> str:
    """The same without white space around it."""
    return text(value).strip()


def texts(value: Any) -> tuple[str, ...]:
    """A list of texts, at least one."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError("a list of texts")
    return tuple(text(entry) for entry in value)


def letter(value: Any) -> str:
    """One letter of the English alphabet, as lower case."""
    if not isinstance(value, str) or len(value.strip()) != 1 or not "a" <= value.strip().lower() <= "z":
        raise ValueError("one letter from a to z")
    return value.strip().lower()


def relation(value: Any) -> str:
    """How a count is compared."""
    if value not in ("less than", "at least"):
        raise ValueError("'less than' or 'at least'")
    return str(value)


Whole = Annotated[int, whole]
Counted = Annotated[int, counted]
Share = Annotated[float, share]
Text = Annotated[str, text]
Trimmed = Annotated[str, trimmed]
Texts = Annotated[tuple[str, ...], texts]
Letter = Annotated[str, letter]
Relation = Annotated[str, relation]


def compare(got: int, how: str, want: int, what: str) -> Finding:
    """The finding of a count that must be less than, or at least, some number."""
    return None if (got < want) == (how == "less than") else f"{got} {what}"


def at_least(got: int, want: int, what: str) -> Finding:
    """The finding of a count that must reach some number."""
    return None if got >= want else f"{got} {what}"


def _short(value: Any) -> str:
    shown = value if isinstance(value, str) else repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
