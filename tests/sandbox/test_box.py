"""`Sandbox` and `SandboxSession`: the result of a run, limits, order, cancellation, and failures."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest

from agentrl.errors import SettingsError, ToolFailure
from agentrl.sandbox import (
    Sandbox,
    SandboxBusy,
    SandboxFailure,
    SandboxLimits,
    SandboxSession,
    SandboxUnavailable,
)
from agentrl.sandbox.launch import Backend, Zygote
from tests.sandbox.host import ROOT
from tests.sandbox.watch import BACKENDS, named, open_box, processes_called, until


async def test_output_error_and_exit_status(box: Sandbox) -> None:
    good = await box.run("import sys\nprint('out'); print('err', file=sys.stderr)")
    assert (good.stdout, good.stderr, good.outcome, good.returncode, good.ok) == ("out\n", "err\n", "ok", 0, True)
    assert 0 < good.seconds < 20
    failed = await box.run("def f():\n    return 1 / 0\n\nf()")
    assert (failed.outcome, failed.returncode) == ("error", 1)
    lines = failed.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line.strip() for line in lines if line.startswith("  File")] == [
        'File "main.py", line 4, in <module>',
        'File "main.py", line 2, in f',
    ]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert (await box.run("raise SystemExit(3)")).returncode == 3
    assert (await box.run("raise SystemExit('bye')")).stderr == "bye\n"
    assert (await box.run("import os; os._exit(4)")).returncode == 4
    assert (await box.run("exit()")).outcome in (
        "ok",
        "error",
    )  # `exit` comes with the module site, which is not loaded


async def test_standard_input(box: Sandbox) -> None:
    assert (await box.run("print(input()[::-1])", stdin="héllo\n")).stdout == "olléh\n"
    assert (await box.run("print(input())")).stderr.endswith("EOFError: EOF when reading a line\n")
    large = "0123456789abcde\n" * 60_000
    assert (await box.run("import sys; print(len(sys.stdin.read()))", stdin=large)).stdout == "960000\n"
    assert (await box.run("print('unread')", stdin=large)).ok


@pytest.mark.parametrize("code", ["x = (", "\0", "print('\ud800')", "é" * 10, "", "#", "import nothing_of_that_name"])
async def test_odd_programs(safe: Sandbox, code: str) -> None:
    result = await safe.run(code)
    assert result.outcome == ("ok" if code in ("", "#") else "error")
    assert "agentrl" not in result.stderr
    async with safe.session() as session:
        assert (await session.run(code)).outcome == result.outcome


async def test_odd_output(safe: Sandbox) -> None:
    assert (await safe.run("import os; os.write(1, b'a\\xffb\\0')")).stdout == "a\ufffdb\0"
    assert (await safe.run("import sys; sys.stdout.close()")).ok
    assert (await safe.run("import os; os.close(1); os.close(2); os.close(3)")).outcome in ("ok", "error")
    assert (await safe.run("import sys; sys.excepthook = lambda *a: print('mine'); 1/0")).stdout == "mine\n"
    bad = "class E(Exception):\n    def __str__(self): raise ValueError\nraise E"
    assert (await safe.run(bad)).outcome == "error"


async def test_what_a_program_leaves_for_its_end_is_done(safe: Sandbox) -> None:
    code = """
import atexit, threading
atexit.register(print, "last")
print("main")
threading.Timer(0.05, print, args=["thread"]).start()
"""
    assert (await safe.run(code)).stdout == "main\nthread\nlast\n"


async def test_timeout_is_the_smaller_of_the_two(box: Sandbox) -> None:
    result = await box.run("print('begun', flush=True)\nwhile True: pass", timeout=0.5)
    assert (result.outcome, result.stdout) == ("timeout", "begun\n")
    assert result.seconds >= 0.5
    assert (await box.run("import time; time.sleep(60)", timeout=0.2)).outcome == "timeout"
    with pytest.raises(SettingsError, match="positive"):
        await box.run("1", timeout=0)
    async with open_box("auto", limits=SandboxLimits(wall_seconds=0.5)) as short:
        assert (await short.run("import time; time.sleep(60)", timeout=30)).seconds < 20


async def test_processor_time() -> None:
    """The program's own CPU time is measured, which does not depend on other load."""
    code = """
import time
told = time.process_time()
while True:
    if time.process_time() > told + 0.1:
        told = time.process_time()
        print(told, flush=True)
"""
    async with (
        open_box("auto", limits=SandboxLimits(wall_seconds=50, cpu_seconds=0.5)) as box,
        box.session() as session,
    ):
        for result in (await box.run(code), await session.run(code)):
            assert result.outcome == "timeout"
            assert result.seconds < 45
            assert 0.3 < float(result.stdout.split()[-1]) < 10


async def test_each_program_is_fresh(box: Sandbox) -> None:
    assert (await box.run("x = 1; import sys; sys.modules['json'] = None; import builtins; builtins.print = None")).ok
    result = await box.run("print('x' in globals(), __name__); import json")
    assert (result.stdout, result.outcome) == ("False __main__\n", "ok")


async def test_random_numbers_differ(safe: Sandbox) -> None:
    code = "import random, os; print(random.random(), os.urandom(4))"
    assert len({(await safe.run(code)).stdout for _ in range(3)}) == 3


async def test_cancellation_ends_the_process(box: Sandbox) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(box.run, named("cancelled-box"))
        await until(lambda: processes_called("cancelled-box") == 1)
        group.cancel_scope.cancel()
    assert processes_called("cancelled-box") == 0
    session = await box.session().__aenter__()
    async with anyio.create_task_group() as group:
        group.start_soon(session.run, named("cancelled-run"))
        await until(lambda: processes_called("cancelled-run") == 1)
        group.cancel_scope.cancel()
    assert processes_called("cancelled-run") == 0
    assert (await session.run("1")).note == "the session was restarted after: cancelled; earlier variables are gone"
    await session.__aexit__(None, None, None)


async def test_closing_the_sandbox_ends_its_sessions(box: Sandbox) -> None:
    session = await box.session().__aenter__()
    await session.run("import ctypes; ctypes.CDLL(None).prctl(15, b'idle-one', 0, 0, 0)")
    assert processes_called("idle-one") == 1
    await box.__aexit__(None, None, None)
    await until(lambda: processes_called("idle-one") == 0)
    with pytest.raises(SandboxUnavailable, match="not open"):
        await box.run("1")


WRITES = """
try:
    open("left-behind", "w").close()
except OSError:
    pass  # not every sandbox lets it
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_outlives_the_parent(backend: str, tmp_path: Path) -> None:
    code = (
        "import anyio, sys, warnings; warnings.simplefilter('ignore')\nfrom agentrl.sandbox import *\n"
        "async def main():\n"
        f"    async with Sandbox({backend!r}, preload=()) as box:\n"
        "        print('open', flush=True)\n"
        f"        await box.run({WRITES + named('orphaned')!r})\n"
        "try:\n    anyio.run(main)\nexcept SandboxUnavailable as error:\n    print('unavailable', error, flush=True)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    assert process.stdout is not None
    with process, process.stdout:
        if process.stdout.readline() != "open\n":
            pytest.skip(f"{backend} does not work here")
        anyio.run(until, lambda: processes_called("orphaned") == 1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    anyio.run(until, lambda: processes_called("orphaned") == 0)
    anyio.run(until, lambda: os.listdir(tmp_path) == [])


async def test_a_full_sandbox_refuses_by_name() -> None:
    async with open_box("auto", max_concurrency=1, queue_seconds=0.2) as box, anyio.create_task_group() as group:
        group.start_soon(box.run, named("the-first"))
        await until(lambda: processes_called("the-first") == 1)
        with pytest.raises(SandboxBusy, match=r"no free place among 1 within 0\.2 s") as refused:
            await box.run("1")
        assert isinstance(refused.value, ToolFailure)
        assert refused.value.kind == "sandbox_busy"
        group.cancel_scope.cancel()


async def test_a_dead_zygote_is_replaced(box: Sandbox) -> None:
    assert (await box.run("1")).ok
    assert box._zygote is not None
    box._zygote.process.kill()
    box._zygote.process.wait()
    for _ in range(3):
        assert (await box.run("print(2)")).stdout == "2\n"


async def test_calls_wait_for_the_new_zygote(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call restarts the zygote. The others wait for the restart, also if that call is cancelled."""
    start, starting, go_on = Sandbox._start, anyio.Event(), anyio.Event()

    async def slowly(self: Sandbox, backend: Backend) -> Zygote:
        starting.set()
        await go_on.wait()
        return await start(self, backend)

    assert (await box.run("1")).ok
    assert box._zygote is not None
    box._zygote.process.kill()
    box._zygote.process.wait()
    box._close_waiting()
    monkeypatch.setattr(Sandbox, "_start", slowly)
    found: list[str] = []

    async def run() -> None:
        found.append((await box.run("print(2)")).stdout)

    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as cancelled:
            cancelled.start_soon(box.run, "print(1)")
            await starting.wait()
            tasks.start_soon(run)
            tasks.start_soon(run)
            await anyio.wait_all_tasks_blocked()
            cancelled.cancel_scope.cancel()
        go_on.set()
    assert found == ["2\n", "2\n"]


async def test_a_dead_zygote_that_does_not_start_again_is_tried_again(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(*_: object) -> None:
        raise SandboxUnavailable("too slow")

    await box.run("print(1)")
    assert box._zygote is not None
    with monkeypatch.context() as patch:
        patch.setattr(Sandbox, "_start", refuses)
        for _ in range(2):
            box._zygote.process.kill()
            box._zygote.process.wait()
            for waiting in box._waiting:
                waiting.close()
            box._waiting.clear()
            with pytest.raises(SandboxFailure, match="did not start again: too slow"):
                await box.run("print(1)")
    assert (await box.run("print(2)")).stdout == "2\n"


@pytest.mark.slow
async def test_the_event_loop_goes_on(safe: Sandbox) -> None:
    longest, last = 0.0, time.perf_counter()

    async def watch() -> None:
        nonlocal longest, last
        while True:
            await anyio.lowlevel.checkpoint()
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        await safe.run("import time; time.sleep(4)")
        group.cancel_scope.cancel()
    assert longest < 3


async def test_preloaded_modules() -> None:
    async with open_box("auto", preload=("json", "nothing_of_that_name")) as box:
        assert (await box.run("import sys; print('json' in sys.modules)")).stdout == "True\n"
    with pytest.raises(SandboxUnavailable, match=r"preload: asyncio.windows_events \(ImportError: win32 only\)"):
        async with open_box("auto", preload=("asyncio.windows_events",)):
            raise AssertionError
    async with open_box("auto", preload=("this",)) as box:  # it prints
        assert (await box.run("print(1)")).stdout == "1\n"


@pytest.mark.parametrize(
    "options",
    [{"backend": "docker"}, {"preload": "numpy"}, {"warm": -1}, {"max_concurrency": 0}, {"queue_seconds": 0}],
)
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match="expected"):
        Sandbox(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["wall_seconds", "memory_mb", "output_bytes"])
@pytest.mark.parametrize("value", [0, -1, "5", True, float("nan"), float("inf"), 1 << 31])
def test_bad_limits(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=name):
        SandboxLimits(**{name: value})  # type: ignore[arg-type]


async def test_use_before_opening() -> None:
    with pytest.raises(SandboxUnavailable, match="async with"):
        await Sandbox().run("1")
    with pytest.raises(SandboxUnavailable, match="async with"):
        await SandboxSession(Sandbox()).run("1")


@pytest.mark.slow
async def test_sixty_four_calls_at_once_on_two_processors() -> None:
    async with Sandbox(limits=SandboxLimits(wall_seconds=10), queue_seconds=60) as box:
        outcomes: list[str] = []

        async def one(number: int) -> None:
            result = await box.run(f"import sympy; print(sympy.factorint({number} + 10**12))")
            outcomes.append(result.outcome)

        async with anyio.create_task_group() as group:
            for number in range(64):
                group.start_soon(one, number)
        assert outcomes == ["ok"] * 64
