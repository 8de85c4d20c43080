"""Threads of sync tools: their number, and what happens to threads whose call was cancelled."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from agentrl.plugins import raised_at
from agentrl.tools import OutcomeKind, Tool, ToolOutcome, threads
from agentrl.tools.threads import ToolThread, ToolThreads, result_of


class Gate:
    """A sync tool's function that returns when the test allows it."""

    def __init__(self) -> None:
        self.release, self.started = threading.Event(), threading.Semaphore(0)

    def __call__(self) -> str:
        self.started.release()
        self.release.wait(20)
        return "open"


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.release.set()


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(120):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def test_hung_tools_are_counted_and_bounded(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MAX_HUNG", 3)
    own = ToolThreads.current()
    hang = Tool(gate, name="hang", description="Hang.", timeout=0.02)
    quick = Tool(lambda: "quick", name="quick", description="Quick.")
    for _ in range(3):
        assert (await hang.run({})).kind is OutcomeKind.TIMEOUT
    await until(lambda: +own.hung == {"hang": 3})
    assert own.places.borrowed_tokens == 0
    outcome = await quick.run({})
    assert outcome.kind is OutcomeKind.HUNG
    assert outcome.text == "Error: `quick` was not run: 3 calls of tools never returned: `hang` (3)"
    gate.release.set()
    await until(lambda: not own.hung.total())
    assert (await quick.run({})).text == "quick"


async def test_a_thread_that_cannot_start_is_no_hung_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    own, quick = ToolThreads.current(), Tool(lambda: "quick", name="quick", description="Quick.", timeout=0.001)
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", refuse)
        assert "can't start new thread" in (await quick.run({})).text
    await anyio.sleep(0.01)  # past the deadline
    assert (own.places.borrowed_tokens, own.hung.total()) == (0, 0)


@pytest.mark.parametrize("native", [False, True])
async def test_a_cancelled_call_keeps_its_place_until_its_thread_ends(gate: Gate, native: bool) -> None:
    own = ToolThreads.current()
    hang = Tool(gate, name="hang", description="Hang.")
    if native:
        task = asyncio.ensure_future(hang.run({}))
        await until(lambda: gate.started.acquire(blocking=False))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hang.run, {})
            await until(lambda: gate.started.acquire(blocking=False))
            tasks.cancel_scope.cancel()
    assert own.places.borrowed_tokens == 1
    assert not +own.hung
    gate.release.set()
    await until(lambda: not own.places.borrowed_tokens)


async def test_cancelled_calls_that_outlive_their_deadline_give_their_places_back_and_are_counted(gate: Gate) -> None:
    own = ToolThreads.current()
    own.places.total_tokens = 2
    hang = Tool(gate, name="hang", description="Hang.", timeout=0.1)
    quick = Tool(lambda: "quick", name="quick", description="Quick.")
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(hang.run, {})
        for _ in range(2):
            await until(lambda: gate.started.acquire(blocking=False))
        tasks.cancel_scope.cancel()
    with anyio.fail_after(120):
        assert (await quick.run({})).text == "quick"
    await until(lambda: +own.hung == {"hang": 2})
    gate.release.set()
    await until(lambda: not own.hung.total())
    assert not own.places.borrowed_tokens


async def test_a_cancelled_call_that_ends_within_its_deadline_is_not_counted(gate: Gate) -> None:
    own = ToolThreads.current()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Tool(gate, name="slow", description="Be slow.", timeout=1.0).run, {})
        await until(lambda: gate.started.acquire(blocking=False))
        tasks.cancel_scope.cancel()
    gate.release.set()
    await until(lambda: not own.places.borrowed_tokens)
    await anyio.sleep(1.05)
    assert own.hung == {}


async def test_a_deadline_that_comes_with_the_answer_leaves_nothing_counted() -> None:
    async with ToolThread("quick", 0.0) as thread:
        assert await thread.run(lambda: 1) == 1
    await anyio.wait_all_tasks_blocked()
    assert ToolThreads.current().hung == {}
    assert not ToolThreads.current().places.borrowed_tokens


async def test_a_call_that_waits_for_a_place_is_told_when_all_hang(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MAX_HUNG", 1)
    own = ToolThreads.current()
    own.places.total_tokens = 1
    hang = Tool(gate, name="hang", description="Hang.", timeout=0.05)
    quick = Tool(lambda: "quick", name="quick", description="Quick.")
    found: list[ToolOutcome] = []

    async def call(entry: Tool) -> None:
        found.append(await entry.run({}))

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, hang)
            tasks.start_soon(call, quick)
    assert [outcome.kind for outcome in found] == [OutcomeKind.TIMEOUT, OutcomeKind.HUNG]


async def test_an_exhausted_iterator_is_an_error_at_the_users_line() -> None:
    def first() -> int:
        return next(iter(list[int]()))

    with pytest.raises(RuntimeError, match=r"^StopIteration, for example of next\(\)$") as raised:
        await result_of(partial(first))
    assert raised_at(raised.value).endswith("in first")
    assert (await Tool(first).run({})).text == "Error: RuntimeError: StopIteration, for example of next()"
