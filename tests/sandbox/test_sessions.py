"""Sessions of a sandbox: what they keep, runs that break one, and parallel runs."""

import ast

import anyio
import pytest

from agentrl.sandbox import Sandbox, SandboxLimits, SandboxUnavailable
from tests.sandbox.watch import named, open_box, processes_called, until
from tests.support.nightly import nightly


async def test_a_session_keeps_its_variables_and_shows_values(box: Sandbox) -> None:
    async with box.session() as one, box.session() as two:
        assert (await one.run("x = 41")).stdout == ""
        assert (await one.run("def f(y):\n    return x + y\nf(1)")).stdout == "42\n"
        assert (await two.run("x")).stderr.endswith("NameError: name 'x' is not defined\n")
        failed = await one.run("y = 5\nf('a')")
        assert failed.stderr.splitlines()[1:2] == ['  File "<cell 3>", line 2, in <module>']
        assert (await one.run("x, y")).stdout == "(41, 5)\n"
        assert (await one.run("import sys; sys.exit(2)")).outcome == "error"
        assert (await one.run("x")).stdout == "41\n"
        assert (await one.run("None")).stdout == ""
        assert (await one.run("input()")).stderr.endswith("EOFError: EOF when reading a line\n")


async def test_closing_a_session_ends_its_run(safe: Sandbox) -> None:
    session, results = safe.session(), list[str]()

    async def run() -> None:
        results.append((await session.run(named("closedrun"))).outcome)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await until(lambda: processes_called("closedrun") == 1)
        await session.close()
    assert (results, processes_called("closedrun")) == (["killed"], 0)


async def test_a_session_that_is_closed_before_its_turn_starts_nothing() -> None:
    async with Sandbox(preload=(), warm=0, max_concurrency=1) as box:
        session, refused = box.session(), list[str]()

        async def run() -> None:
            with pytest.raises(SandboxUnavailable, match="the session is closed"):
                await session.run("1")
            refused.append("run")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(box.run, named("firstrun").replace("1000", "0.5"))
            await until(lambda: processes_called("firstrun") == 1)
            tasks.start_soon(run)
            await anyio.wait_all_tasks_blocked()
            await session.close()
        assert refused == ["run"]


@pytest.mark.parametrize(
    ("code", "outcome"),
    nightly(
        [
            ("while True: pass", "timeout"),
            ("import os; os._exit(0)", "error"),
            ("import ctypes; ctypes.string_at(0)", "killed"),
            ("while True: print('x' * 1000)", "output"),
        ],
        2,
    ),
)
async def test_a_session_that_broke_starts_afresh_and_says_so(safe: Sandbox, code: str, outcome: str) -> None:
    async with safe.session() as session:
        await session.run("x = 1")
        broken = await session.run(code, timeout=2.0)
        assert broken.outcome == outcome
        after = await session.run("'x' in globals()")
        assert after.stdout == "False\n"
        assert after.note == f"the session was restarted after: {outcome}; earlier variables are gone"
        assert (await session.run("1")).note == ""


async def test_a_session_out_of_memory_goes_on(safe: Sandbox) -> None:
    async with safe.session() as session:
        await session.run("x = 1")
        assert (await session.run("y = bytearray(4 << 30)")).outcome == "memory"
        assert (await session.run("x")).stdout == "1\n"


async def test_a_session_that_works_on_between_its_runs(safe: Sandbox) -> None:
    async with safe.session() as session:
        await session.run("import threading, time\ndef f():\n    time.sleep(0.05); print('later')\n")
        await session.run("t = threading.Thread(target=f); t.start()")
        assert "later" in (await session.run("t.join()")).stdout


@pytest.mark.slow
async def test_a_session_that_never_rests_between_its_runs_is_ended() -> None:
    async with open_box("auto", limits=SandboxLimits(cpu_seconds=0.3)) as box, box.session() as session:
        spin = "def f():\n    while True: pass\nthreading.Thread(target=f, daemon=True).start()"
        await session.run(f"import ctypes, threading\nctypes.CDLL(None).prctl(15, b'restless', 0, 0, 0)\n{spin}")
        await until(lambda: processes_called("restless") == 0)
        assert "between two runs" in (await session.run("1")).note


async def test_many_sessions_at_once(safe: Sandbox) -> None:
    values: set[str] = set()

    async def one(number: int) -> None:
        async with safe.session() as session:
            await session.run(f"x = {number}")
            values.add((await session.run("x")).stdout)

    async with anyio.create_task_group() as group:
        for number in range(40):
            group.start_soon(one, number)
    assert values == {f"{number}\n" for number in range(40)}


async def test_runs_of_one_session_take_turns(safe: Sandbox) -> None:
    async with safe.session() as session:
        await session.run("log = []")
        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(session.run, f"log += [{number}, {number}]")
        seen = ast.literal_eval((await session.run("log")).stdout)
        assert sorted(seen[::2]) == list(range(5))
        assert seen[::2] == seen[1::2]
