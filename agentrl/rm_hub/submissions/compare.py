"""Whether what came out is what should: outputs of programs, and values of calls. Runs outside of the sandbox."""

import math
from decimal import Decimal, InvalidOperation
from typing import Any

_TOLERANCE = 1e-6


def same_output(got: str, want: str) -> bool:
    """Line for line, white space at the ends and empty last lines aside; numbers with a point to 1e-6."""
    got_lines, want_lines = _trimmed(got), _trimmed(want)
    return len(got_lines) == len(want_lines) and all(map(_same_line, got_lines, want_lines))


def _trimmed(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.split("\n")).strip("\n").split("\n")


def _same_line(got: str, want: str) -> bool:
    if got == want:
        return True
    a, b = got.split(), want.split()
    return len(a) == len(b) and all(x == y or _same_number(x, y) for x, y in zip(a, b, strict=True))


def _same_number(got: str, want: str) -> bool:
    if len(got) > 60 or len(want) > 60 or "_" in got:
        return False
    try:
        a, b = Decimal(got), Decimal(want)
    except InvalidOperation:
        return False
    if not (a.is_finite() and b.is_finite()):
        return False
    if "." not in want and "e" not in want.lower():
        return a == b
    return math.isclose(float(a), float(b), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def same_value(got: Any, want: Any) -> bool:
    """A value in the sandbox's encoding against a JSON value; tuples are lists, keys of dicts may be texts.

    A list of one value as expectation also accepts that value: some data sets wrap results.
    """
    plain = _plain(got)
    return _equal(plain, want) or (isinstance(want, list) and len(want) == 1 and _equal(plain, want[0]))


_NO_DATA = object()
"""Stands for what is no data: equal to nothing."""


def _plain(data: Any) -> Any:
    """The JSON form of an encoded value."""
    if not isinstance(data, list):
        return data
    match data:
        case ["l" | "t" | "q", *items]:
            return [_plain(item) for item in items]
        case ["i", str(text)] if len(text) < 100_000:
            return int(text, 16)
        case ["d", *pairs]:
            return {_key(_plain(pair[0])): _plain(pair[1]) for pair in pairs}
        case ["s" | "z", *items]:
            return sorted((_plain(item) for item in items), key=repr)
        case ["n", _, [_], list(items)]:
            return [_plain(item) for item in items]
        case ["f", str(text)] if text in ("inf", "-inf", "nan"):
            return float(text)
        case ["h", _, _, _, ["v", inner]]:
            return _plain(inner)
    return _NO_DATA


def _key(key: Any) -> str:
    return key if isinstance(key, str) else repr(key)


def _equal(got: Any, want: Any) -> bool:
    if isinstance(want, dict):
        if not isinstance(got, dict):
            return False
        wanted = {_key(key): value for key, value in want.items()}
        return got.keys() == wanted.keys() and all(_equal(got[key], wanted[key]) for key in wanted)
    if isinstance(want, (list, tuple)):
        same_length = isinstance(got, list) and len(got) == len(want)
        return same_length and all(_equal(a, b) for a, b in zip(got, want, strict=True))
    if isinstance(want, bool) or isinstance(got, bool) or want is None or isinstance(want, str):
        return type(got) is type(want) and bool(got == want)
    if isinstance(want, (int, float)) and isinstance(got, (int, float)):
        if isinstance(want, int) and isinstance(got, int):
            return got == want
        try:
            return math.isclose(got, want, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        except OverflowError:
            return False
    return False
