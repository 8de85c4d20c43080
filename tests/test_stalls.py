"""Causes of a blocked event loop: threads, stopped processes and a held GIL."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import anyio
import pytest

from agentrl.clock import Deadline, Watchdog
from agentrl.errors import TrajectoryPlace
from agentrl.stalls import ThreadTimes, cause

pytestmark = pytest.mark.skipif(ThreadTimes.of(threading.get_native_id()) is None, reason="needs /proc/self/task")


def times(now: float, cpu: float, delay: float = 0.0, switches: int = 0, **others: float) -> ThreadTimes:
    return ThreadTimes(now, cpu, delay, switches, cpu + sum(others.values()), others)


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        (times(0.1, 0.1), "its own code"),  # it computes
        (times(0.1, 0.05, 0.05), "its own code"),  # it computes beside another program
        (times(0.1, 0.0, switches=1), "its own code"),  # it sleeps, or waits for a socket
        (times(0.1, 0.0, switches=1, trainer=40.1), "its own code"),  # it sleeps while another thread works
        (times(5.0, 5.0), "its own code"),  # it holds the GIL itself, in C
        (times(0.1, 0.01, 0.09), "other programs on the processor"),
        (times(0.1, 0.0, switches=20, trainer=40.09), "another thread"),  # it asks for the GIL every 5 ms
        (times(5.0, 0.0, switches=1, trainer=44.9), "another thread"),
        (times(5.0, 0.0, trainer=40.0), "a stopped process"),
    ],
)
def test_the_cause_follows_from_the_threads_times(after: ThreadTimes, kind: str) -> None:
    found, why = cause(times(0.0, 0.0, trainer=40.0), after)
    assert found == kind
    assert ("trainer" in why) == (kind == "another thread")


def spin() -> None:
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        pass


def receive() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.6)
        with pytest.raises(TimeoutError):
            server.accept()


def hold_the_interpreter(seen: threading.Event) -> None:
    """Hold the GIL in C, a second or longer at a time, by a backtracking pattern, until the watchdog has seen it."""
    size = 20
    while not seen.is_set():
        began = time.monotonic()
        assert re.match(r"(a|a)+$", "a" * size + "!") is None
        if time.monotonic() - began < 1:
            size += 1


@pytest.mark.parametrize("block", [lambda: time.sleep(0.6), receive, spin])
async def test_code_that_keeps_the_loop_itself_is_to_blame(block: Callable[[], None]) -> None:
    with Watchdog.watching(0.3) as watchdog, Deadline(0.1, "step", place=TrajectoryPlace(group=1)) as call:
        await anyio.lowlevel.checkpoint()
        block()
        await anyio.lowlevel.checkpoint()
    await anyio.sleep(0.2)
    others = {"other programs on the processor"}  # on a loaded machine
    assert call.overdue or others <= set(watchdog.stalls)
    assert not set(watchdog.stalls) - {"step"} - others


@pytest.mark.slow
async def test_a_thread_that_holds_the_interpreter_is_named_and_nobody_charged() -> None:
    told: dict[str, str] = {}
    loop, named, seen = asyncio.get_running_loop(), anyio.Event(), threading.Event()

    def tell(seconds: float, who: str, where: str) -> None:
        told.setdefault(who, where)
        if who == "another thread":
            loop.call_soon_threadsafe(named.set)

    with Watchdog.watching(0.5, tell) as watchdog:
        with Deadline(60, "step") as call:
            threading.Thread(target=hold_the_interpreter, args=(seen,), name="the trainer", daemon=True).start()
            await named.wait()
        seen.set()
        assert "blocked" not in call.verdict
        await anyio.sleep(0.2)
    beside = {"other programs on the processor"}  # on a loaded machine
    assert set(told) - beside == {"another thread"}
    assert "held the interpreter" in told["another thread"]
    assert set(watchdog.stalls) - beside <= {"another thread", "unseen"}


STOPPED = """
import anyio, sys
from agentrl.clock import Deadline, Watchdog

async def main():
    told = []
    with Watchdog.watching(1.0, lambda _, who, where: told.append(who)), Deadline(1.5, "step") as call:
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        for _ in range(50):
            await anyio.sleep(0.01)
    print(call.overdue, told, flush=True)

anyio.run(main)
"""


def test_a_process_that_was_stopped_is_nobodys_fault() -> None:
    command = [sys.executable, "-c", STOPPED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.5)  # the halt is the fault that is injected
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() in ("False ['a stopped process']\n", "False []\n")
