"""Errors inside exception groups are found in order, and raised by their own type; others are raised as ours."""

import anyio
import pytest

from agentrl.errors import DataError, ToolFailure, first_error, leaves, raised_as, ungrouped


def test_leaves_are_found_in_order_at_any_depth() -> None:
    a, b, c = ValueError("a"), KeyError("b"), OSError("c")
    nested = ExceptionGroup("outer", [ExceptionGroup("inner", [a, b]), c])
    assert list(leaves(nested)) == [a, b, c]
    assert first_error(nested) is a
    assert list(leaves(c)) == [c]


async def test_a_task_groups_failure_comes_out_as_it_is() -> None:
    async def fail() -> None:
        raise ToolFailure("cannot go on")

    with pytest.raises(ToolFailure, match="cannot go on"), ungrouped():
        async with anyio.create_task_group() as outer, anyio.create_task_group():
            outer.start_soon(fail)


def test_named_errors_are_raised_as_another_kind() -> None:
    with pytest.raises(DataError) as caught, raised_as(DataError, "rows.jsonl", ValueError, KeyError, remedy="mend it"):
        raise ValueError("no number")
    assert str(caught.value) == "rows.jsonl: no number; mend it"
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(OSError, match="full"), raised_as(DataError, "rows.jsonl", ValueError):
        raise OSError("full")
