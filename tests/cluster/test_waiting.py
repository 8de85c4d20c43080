"""Waiting for several processes: the result of each, and the failure of any."""

import asyncio
from typing import Any

import anyio
import pytest

from agentrl.cluster.runtime import unless, values
from agentrl.errors import EngineUnreachable, TrainError


def references(count: int) -> list[Any]:
    """Make pending results that replace Ray's references."""
    loop = asyncio.get_running_loop()
    return [loop.create_future() for _ in range(count)]


async def test_answers_come_in_the_order_of_the_calls() -> None:
    ranks = references(3)
    for number in (2, 0, 1):
        ranks[number].set_result(f"rank {number}")
    assert await values(ranks) == ["rank 0", "rank 1", "rank 2"]


@pytest.mark.parametrize("rank", [0, 2])
async def test_the_failure_of_any_rank_ends_the_wait_for_the_others(rank: int) -> None:
    ranks = references(3)
    ranks[rank].set_exception(TrainError(f"rank {rank} has no room"))
    with anyio.fail_after(120), pytest.raises(TrainError, match=f"rank {rank} has no room"):
        await values(ranks)


async def test_the_last_rank_is_waited_for() -> None:
    first, last = references(2)
    first.set_result("done")
    waiting = asyncio.ensure_future(values([first, last]))
    await anyio.wait_all_tasks_blocked()
    assert not waiting.done()
    last.set_exception(TrainError("after the first was done"))
    with pytest.raises(TrainError, match="after the first"):
        await waiting


async def test_an_answer_is_not_waited_for_once_nobody_serves() -> None:
    serving, answer = references(2)
    serving.set_exception(EngineUnreachable("the engines are gone"))
    with anyio.fail_after(120), pytest.raises(EngineUnreachable, match="the engines are gone"):
        await unless(serving, answer)


async def test_an_answer_does_not_wait_for_the_end_of_the_serving() -> None:
    serving, answer = references(2)
    answer.set_result("answered")
    with anyio.fail_after(120):
        assert await unless(serving, answer) == "answered"
