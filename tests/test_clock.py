"""Deadlines that count only time that a call is responsible for, and the watchdog that names what blocks the loop."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest
import uvloop

from agentrl import clock
from agentrl.clock import Deadline, Watchdog, note_turn, waiting
from agentrl.errors import TrajectoryPlace
from agentrl.tools import tool
from tests.support.virtual_time import virtual_time

BLOCK = 1.2
"""Seconds that the blocking code of these tests blocks."""


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "BEAT", 0.03)


def block() -> None:
    time.sleep(BLOCK)


async def beat(watchdog: Watchdog) -> None:
    """Return when the watchdog has seen the stall."""
    with anyio.fail_after(120):
        while not watchdog.stalls:  # noqa: ASYNC110 - a thread counts them
            await anyio.sleep(0.01)


async def two_awaits(found: list[Deadline]) -> None:
    with Deadline(1.0, "innocent") as limit:
        await anyio.sleep(0.01)
        await anyio.sleep(0.01)
    found.append(limit)


@virtual_time
async def test_a_deadline_cuts_off_what_takes_longer() -> None:
    with anyio.fail_after(120), Deadline(0.02, "slow") as limit:
        await anyio.sleep_forever()
    assert limit.overdue
    assert limit.verdict == "slow took longer than 0.02 s"


async def test_deadlines_do_not_run_while_the_loop_stands_still_for_somebody_else() -> None:
    found: list[Deadline] = []
    with Watchdog.watching(10):
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(two_awaits, found)
            await anyio.sleep(0.005)
            block()
    assert [limit.overdue for limit in found] == [False] * 20


@pytest.mark.parametrize("awaits", [False, True])
async def test_whoever_blocks_the_loop_for_longer_than_its_deadline_is_late(awaits: bool) -> None:
    with Watchdog.watching(10), Deadline(10, "trajectory") as outer, Deadline(0.1, "culprit") as limit:
        await anyio.lowlevel.checkpoint()
        block()
        if awaits:
            await anyio.sleep(0.2)
    assert limit.overdue
    assert not outer.overdue
    assert limit.verdict.startswith("culprit took longer than 0.1 s: it blocked the event loop at ")
    assert f"{__file__}:{block.__code__.co_firstlineno + 1} in block" in limit.verdict


async def test_what_a_call_inside_blocks_counts_for_the_call_around_it() -> None:
    with Watchdog.watching(10), Deadline(0.1, "env") as outer, Deadline(10, "tool") as inner:
        block()
    assert outer.overdue
    assert not inner.overdue


async def test_a_deadline_goes_on_when_the_loop_does() -> None:
    async def blocker() -> None:
        block()

    began = time.monotonic()
    with Watchdog.watching(10), anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(blocker)
            with Deadline(0.1, "slow") as limit:
                await anyio.sleep_forever()
    assert limit.overdue
    assert limit.verdict == "slow took longer than 0.1 s"  # it was not the one that blocked
    assert time.monotonic() - began >= 0.1 + BLOCK - 2 * clock.BEAT


def stalls(watchdog: Watchdog) -> dict[str, float]:
    return {name: value for name, value in watchdog.take().items() if name.startswith("stalls/")}


async def test_the_share_of_computing_and_the_wait_of_callbacks_are_metrics() -> None:
    async def heard() -> None:
        before = watchdog.heard
        with anyio.fail_after(120):
            while watchdog.heard == before:  # noqa: ASYNC110 - a thread asks
                await anyio.sleep(0.01)

    with Watchdog.watching(10) as watchdog:
        await heard()
        watchdog.take()
        block()
        await heard()
        slept = watchdog.take()
        until = time.thread_time() + 3 * clock.BEAT
        while time.thread_time() < until:
            pass
        computed = watchdog.take()
    assert slept["loop/lag_p99"] > clock.BEAT
    assert slept["loop/busy_share"] < computed["loop/busy_share"] <= 1.01


async def test_the_watchdog_says_whose_code_it_is(caplog: pytest.LogCaptureFixture) -> None:
    @tool
    async def stuck() -> str:
        """Block."""
        block()
        return "x"

    with Watchdog.watching(0.5) as watchdog:
        with Deadline(math.inf, "the trajectory", place=TrajectoryPlace(3, 24)):
            note_turn(2)
            async with anyio.create_task_group() as tasks:  # as an environment runs its calls: in separate tasks
                tasks.start_soon(stuck.run, {})
        await beat(watchdog)
    assert stalls(watchdog) == {"stalls/tool stuck": 1}
    assert stalls(watchdog) == {}
    record, *_ = [r for r in caplog.records if r.name == "agentrl.clock"]
    assert record.levelno == logging.WARNING
    assert "in tool stuck (group 3, sample 24, turn 2), at " in record.message
    assert "test_clock.py" in record.message
    assert "the event loop was blocked for " in record.message


async def test_code_outside_any_trajectory_is_named_by_its_line(caplog: pytest.LogCaptureFixture) -> None:
    with Watchdog.watching(0.5) as watchdog:
        block()
        await beat(watchdog)
    assert watchdog.stalls == {"code outside any trajectory": 1}
    assert f"{__file__}:{block.__code__.co_firstlineno + 1} in block" in caplog.text


async def test_a_reading_that_comes_too_late_names_no_culprit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on, seen = threading.Event(), iter(["innocent.py:1 in idle"])

    def late(watchdog: Watchdog) -> tuple[None, str]:
        goes_on.wait(60)
        return None, next(seen, "later.py:1 in slow")  # a busy machine may delay the loop once more

    monkeypatch.setattr(Watchdog, "_look", late)
    monkeypatch.setattr(clock, "cause", lambda *_: ("its own code", ""))
    with Watchdog.watching(clock.BEAT / 2) as watchdog:
        block()
        await beat(watchdog)
        heard = watchdog.heard
        goes_on.set()
        with anyio.fail_after(120):
            while watchdog.heard == heard:  # noqa: ASYNC110 - the thread asks again once it has looked
                await anyio.sleep(0.01)
    assert "unseen" in watchdog.stalls
    assert "innocent" not in caplog.text


async def test_no_time_is_lost_while_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "BEAT", 0.5)  # so that only a stall of a second would count
    with Watchdog.watching(1.0) as watchdog:
        for _ in range(120):
            await anyio.sleep(0.01)
        assert watchdog.lost == 0
    assert watchdog.lost == 0
    assert not watchdog.stalls


@virtual_time
async def test_held_time_does_not_count() -> None:
    held, reached = 0.0, False

    def seconds() -> float:
        return held

    with anyio.fail_after(120), Deadline(0.1, "trajectory", held=seconds) as limit:
        held = 0.1
        await anyio.sleep(0.15)
        reached = True
        await anyio.sleep_forever()
    assert limit.overdue
    assert reached


@virtual_time
async def test_waits_side_by_side_stop_the_outer_clock_together() -> None:
    place = anyio.Semaphore(1)

    async def work() -> None:
        async with waiting(place):
            await anyio.sleep(0.03)

    with Deadline(0.08, "env", work_only=True) as limit:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(work)
    assert not limit.overdue


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_ray_s_event_loop_is_watched_as_well(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        found: list[Deadline] = []

        async def culprit() -> None:
            with Deadline(0.1, "culprit") as limit:
                block()
            found.append(limit)

        with Watchdog.watching(0.5) as watchdog:
            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(two_awaits, found)
                tasks.start_soon(culprit)
            await beat(watchdog)
        assert {limit.what for limit in found if limit.overdue} == {"culprit"}
        assert watchdog.stalls == {"culprit": 1}

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
