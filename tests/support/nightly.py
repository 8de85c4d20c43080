"""Parameters of tests: some for `make test`, the others only for `make test-nightly`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings


def nightly(values: Iterable[Any], everyday: int | Collection[Any]) -> list[Any]:
    """Return every value as a parameter. Values after the first `everyday`, or not in `everyday`, are marked slow.

    A tuple is a row: it has one value for each name.
    """
    first = everyday if isinstance(everyday, int) else 0
    kept: Collection[Any] = () if isinstance(everyday, int) else everyday
    return [value if number < first or value in kept else _slow(value) for number, value in enumerate(values)]


def examples(share: float) -> int:
    """Return this share of the number of examples in the profile of property tests."""
    return max(1, round(settings().max_examples * share))


def _slow(value: Any) -> Any:
    """Return the value, row or parameter with the mark."""
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.slow], id=value.id)
    row = value if isinstance(value, tuple) else (value,)
    return pytest.param(*row, marks=pytest.mark.slow)
