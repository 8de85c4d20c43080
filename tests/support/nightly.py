"""Parameters of tests: some for `make test`, the others for `make test-nightly` alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings


def nightly(values: Iterable[Any], everyday: int | Collection[Any]) -> list[Any]:
    """Every value as a parameter; slow are those after the first `everyday`, or those that are not in it.

    A tuple is a row: it has one value for each name.
    """
    first = everyday if isinstance(everyday, int) else 0
    kept: Collection[Any] = () if isinstance(everyday, int) else everyday
    return [value if number < first or value in kept else _slow(value) for number, value in enumerate(values)]


def examples(share: float) -> int:
    """Return so large a share of the examples that the profile of property tests draws."""
    return max(1, round(settings().max_examples * share))


def _slow(value: Any) -> Any:
    """The value, its row or its parameter with the mark."""
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.slow], id=value.id)
    row = value if isinstance(value, tuple) else (value,)
    return pytest.param(*row, marks=pytest.mark.slow)
