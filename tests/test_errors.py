"""Errors inside exception groups: found in order, and let out by their own type."""

import anyio
import pytest

from agentrl.errors import ToolFailure, first_error, leaves, ungrouped


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
