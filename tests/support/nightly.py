"""Parameters of tests: some for `make test`, others only for `make test-nightly` or `make test-weekly`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings


def nightly(values: Iterable[Any], everyday: int | Collection[Any]) -> list[Any]:
    """Return every value as a parameter. Values after the first `everyday`, or not in `everyday`, are marked slow.

    A tuple is a row: it has one value for each name.
    """
    return _marked(values, everyday, (pytest.mark.slow,))


def weekly(values: Iterable[Any], every_night: int | Collection[Any]) -> list[Any]:
    """Return every value as a parameter. Values after the first `every_night`, or not in it, are marked weekly.

    These are further forms of a slow test: other seeds, layouts or processes.
    """
    return _marked(values, every_night, (pytest.mark.slow, pytest.mark.weekly))


def examples(share: float) -> int:
    """Return this share of the number of examples in the profile of property tests."""
    return max(1, round(settings().max_examples * share))


def _marked(values: Iterable[Any], often: int | Collection[Any], marks: tuple[pytest.MarkDecorator, ...]) -> list[Any]:
    first = often if isinstance(often, int) else 0
    kept: Collection[Any] = () if isinstance(often, int) else often
    return [value if at < first or value in kept else _with(value, marks) for at, value in enumerate(values)]


def _with(value: Any, marks: tuple[pytest.MarkDecorator, ...]) -> Any:
    """Return the value, row or parameter with the marks."""
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, marks=[*value.marks, *marks], id=value.id)
    row = value if isinstance(value, tuple) else (value,)
    return pytest.param(*row, marks=marks)
