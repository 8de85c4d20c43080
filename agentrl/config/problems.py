"""Turns pydantic's errors into sentences that name the flag or file line, the value, and the expected value."""

import difflib
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from pydantic import ValidationError

from agentrl.config.compat_interface import foreign
from agentrl.config.fields import FieldRef
from agentrl.errors import AgentRLError, SettingsError
from agentrl.settings import flag_of, shown

_TYPE = re.compile(r"int|float|str|bool|.*\[.*")  # pydantic adds the type of a union's member to a location
_NEAR = 0.78
"""Minimum similarity of a suggested name. A less similar name is suggested if it has all words of the unknown name."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean a or b?` with the known names closest to `name`, best first; "" if no name is close."""
    names, plain = list(known), name.lstrip("-").replace("-", "_")
    others = compat.called() if (compat := foreign()) else {}
    called = [others[other] for other in difflib.get_close_matches(plain, others, n=1, cutoff=0.9)]
    if not (best := [other for other in (*called, *map(flag_of, called)) if other in names]):
        alike = {other: difflib.SequenceMatcher(None, name.strip("-"), other.strip("-")).ratio() for other in names}
        close = sorted((other for other in names if _near(name, other, alike[other])), key=lambda o: -alike[o])
        best = [other for other in close[:3] if alike[other] > alike[close[0]] - 0.1]
    return f"; did you mean {' or '.join(best)}?" if best else ""


def _near(name: str, other: str, alike: float) -> bool:
    mine, theirs = (set(re.split("[-_]+", n.strip("-_"))) for n in (name, other))
    return alike >= _NEAR or (mine <= theirs and (len(mine) > 1 or other.startswith(name)))


def unknown(names: Sequence[str], known: Iterable[str], what: str) -> list[str]:
    """Return sentences about unknown names, one for all names with the same answer; `what` they are: `flag`."""
    known, answered, out, compat = list(known), defaultdict[str, list[str]](list), [], foreign()
    for name in dict.fromkeys(names):
        if said := compat and compat.answer(name):
            answered[said].append(name)
        else:
            out.append(f"unknown {what} {name}{did_you_mean(name, known)}")
    for said, alike in answered.items():
        out.append(f"{', '.join(alike)}: {said.format(it='it' if len(alike) == 1 else 'them')}")
    return out


def sentences(error: ValidationError, fields: Mapping[str, FieldRef], origins: Mapping[str, str]) -> list[str]:
    """Return one sentence per error. `origins`: the source of a field's value (a flag, a file's line)."""
    out: list[str] = []
    for item in error.errors(include_url=False):
        name = str(item["loc"][0]) if item["loc"] else ""
        field = fields.get(name)
        message = str(item["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if field is None:
            out.append(f"{name}: {message}" if name else message)
            continue
        where = origins.get(name) or field.flag
        if item["type"] in ("value_error", "assertion_error"):
            sentence = f"{where}: {message}"
        else:
            inside = "".join(f"[{part!r}]" for part in item["loc"][1:] if not _TYPE.fullmatch(str(part)))
            expected = "a finite number" if item["type"] == "finite_number" else field.expected()
            # The key of a mapping can mark its value as a secret.
            refused = functools.reduce(shown, item["loc"][1:], item["input"])
            sentence = f"{where}: expected {expected}; got {refused!r:.200}"
            sentence += f" at {inside} ({message})" if inside else ""
        if sentence not in out:
            out.append(sentence)
    return out


def one_error(problems: list[str]) -> SettingsError:
    """Return all problems as one error: a single sentence, or a list of sentences."""
    if len(problems) == 1:
        return SettingsError(problems[0])
    error = SettingsError(f"{len(problems)} settings need attention:\n" + "\n".join(f"  - {p}" for p in problems))
    error.parts = tuple(problems)
    return error


class Problems:
    """Errors of several checks, raised together: `with problems:` around each check, `raise_all()` after the last."""

    passed = True  # true if the newest check raised nothing

    def __init__(self) -> None:
        self._errors: list[AgentRLError] = []

    @staticmethod
    def raised() -> AbstractContextManager[None]:
        """Return a context that collects nothing: the first error is raised at once."""
        return nullcontext()

    def __enter__(self) -> None:
        self.passed = True

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, AgentRLError):
            self._errors.append(error)
            self.passed = False
            return True
        return False

    @property
    def any(self) -> bool:
        return bool(self._errors)

    def raise_all(self) -> None:
        """Raise a single error unchanged, several errors as one `SettingsError` that lists each problem once."""
        parts = [part for error in self._errors for part in (getattr(error, "parts", ()) or (str(error),))]
        if len(unlike := list(dict.fromkeys(parts))) > 1:
            raise one_error(unlike)
        if self._errors:
            raise self._errors[0]
