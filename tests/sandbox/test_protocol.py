"""The channel between a confined process and its jailer: code cannot prevent a `RunResult`."""

import socket
import struct
from collections.abc import AsyncIterator

import anyio
import pytest

from agentrl.sandbox import Outcome, Sandbox, SandboxInput, SandboxLimits, SandboxUnavailable
from agentrl.sandbox.inside import frames
from agentrl.sandbox.process import Process, encode_request
from tests.sandbox.host import Host
from tests.sandbox.watch import open_box, processes_called, until
from tests.support.nightly import nightly

OUTCOMES: set[Outcome] = {"ok", "error", "timeout", "memory", "output", "killed"}
ANSWER = {"outcome": "ok", "returncode": 0, "ended": False, "stdout": "forged", "stderr": ""}
FORGED = {
    "ready": frames.encode({"ready": 1}),
    "failed": frames.encode({"failed": "forged"}),
    "both": frames.encode({"ready": 1, "failed": "forged"}),
    "gone": frames.encode({"gone": True}),
    "answer": frames.encode(ANSWER),
    "done": frames.encode({"done": 1, "id": 1, "status": 0, "memory": False}),
    "many": frames.encode({}) * 10_000,
    "endless": struct.pack(">I", 2**32 - 1) * 2,
    "no object": struct.pack(">I", 1) + b"[",
    "ready again": frames.READY,
    "two answers": b"oo",
    "answer and more": b"o" + frames.encode(ANSWER),
    "zeros": bytes(100_000),
}


DAILY = ("ready", "many", "two answers", "an answer")


@pytest.mark.parametrize("name", nightly(FORGED, DAILY))
@pytest.mark.parametrize("ending", nightly(["raise ValueError", "import time; time.sleep(1000)"], 1))
def test_forged_words_end_only_their_sender(host: Host, name: str, ending: str) -> None:
    code = f"import os, atexit\nprint('before', flush=True)\nos.write(3, {FORGED[name]!r})\n{ending}"
    for result in (host.run(code), host.cell("forger", code)):
        assert result.outcome == "killed", result
        assert result.stdout.startswith("before\n")
        assert "forged" not in result.stdout + result.stderr + result.note
    after = host.cell("forger", "print('fine')")
    assert (after.stdout, after.outcome) == ("fine\n", "ok")
    assert after.note == "the session was restarted after: killed; earlier variables are gone"
    assert host.run("print('fine')").stdout == "fine\n"


@pytest.mark.parametrize("word", nightly(frames.ANSWERS, 2))
def test_a_forged_answer_is_one_too_many(host: Host, word: bytes) -> None:
    code = f"import os\nos.write(3, {word!r})\nraise ValueError"
    assert host.run(code).outcome == "killed"
    assert host.run(f"import atexit, os\natexit.register(os.write, 3, {word!r})").outcome == "killed"
    assert host.cell("early", code).outcome in ("killed", frames.ANSWERS[word])
    assert host.cell("early", "print('fine')").outcome in OUTCOMES
    assert host.run("print('fine')").stdout == "fine\n"


@pytest.mark.parametrize("name", nightly([*FORGED, "an answer"], DAILY))
def test_words_between_two_cells_end_the_session(host: Host, name: str) -> None:
    word = FORGED.get(name, b"o")
    code = f"""
import os, threading, time
def flood():
    time.sleep(0.05)
    while True:
        os.write(3, {word!r})
import ctypes; ctypes.CDLL(None).prctl(15, b"between", 0, 0, 0)
threading.Thread(target=flood, daemon=True).start()
"""
    outcome = host.cell("flood", code).outcome
    anyio.run(until, lambda: processes_called("between") == 0)
    after = host.cell("flood", "print('fine')")
    assert after.stdout == "fine\n"
    # If the machine stalls for this long, the flood arrives before the answer is read.
    cause = {"ok": "its process ended between two runs", "killed": "killed"}[outcome]
    assert after.note == f"the session was restarted after: {cause}; earlier variables are gone"


@pytest.mark.parametrize(
    "code",
    nightly(
        [
            "os.close(3)",
            "os.closerange(3, 256)",
            "os.closerange(0, 256)",
            "os.closerange(3, 256); socket.socketpair()",
            "os.closerange(3, 256); kept = open(os.__file__)",
            "socket.socket(fileno=os.dup(3)).shutdown(socket.SHUT_RD)",
            "socket.socket(fileno=os.dup(3)).shutdown(socket.SHUT_WR)",
            "socket.socket(fileno=os.dup(3)).shutdown(socket.SHUT_RDWR)",
            "os.dup2(0, 3)",
            "os.dup2(3, 0); os.dup2(3, 1); os.dup2(3, 2)",
            "pair = socket.socketpair(); os.dup2(pair[0].fileno(), 3)",
            "kept = [os.dup(3) for _ in range(100)]",
            "os.set_blocking(3, False)",
            "threading.Thread(target=os.read, args=(3, 1), daemon=True).start()",
            "os.kill(os.getpid(), signal.SIGSTOP)",
            "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))",
            "sys.modules.clear(); sys.stdout = sys.stderr = None",
        ],
        ("os.close(3)", "os.dup2(0, 3)", "socket.socket(fileno=os.dup(3)).shutdown(socket.SHUT_RD)"),
    ),
)
def test_a_channel_that_was_broken(host: Host, code: str) -> None:
    code = f"import os, signal, socket, sys, threading\nprint('before', flush=True)\n{code}"
    program = host.run(code, timeout=1)
    assert program.outcome in OUTCOMES
    assert program.stdout.startswith("before\n") or "closerange(0" in code
    for cell in (code, "print('fine')", "print('fine')"):
        assert host.cell("broken", cell, timeout=1).outcome in OUTCOMES
    assert host.run("print('fine')").stdout == "fine\n"


@pytest.mark.parametrize("closing", ["os.close(3)", "os.closerange(3, 256)", "os.dup2(0, 3)"])
def test_a_program_that_closed_the_channel_is_judged_by_its_exit(host: Host, closing: str) -> None:
    assert host.run(f"import os\n{closing}\nprint('done')").outcome == "ok"
    assert host.run(f"import os\n{closing}\nraise SystemExit(4)").returncode == 4


async def test_a_copy_that_runs_on_gives_no_answer() -> None:
    try:
        async with open_box("bubblewrap") as box, box.session() as session:
            code = "import os\npid = os.fork()\nprint('both', flush=True)\nif pid: os.waitpid(pid, 0)"
            for result in (await box.run(code), await session.run(code)):
                assert (result.stdout, result.outcome) == ("both\nboth\n", "ok")
            assert (await session.run("pid > 0")).stdout == "True\n"
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(params=["bubblewrap", "landlock"])
async def tight(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """Yield a sandbox with a limit of half a second of CPU time."""
    try:
        async with open_box(request.param, limits=SandboxLimits(cpu_seconds=0.5, wall_seconds=60)) as box:
            yield box
    except SandboxUnavailable as error:
        pytest.skip(str(error))


SPIN = """
import ctypes, os, threading
def spin():
    while True: pass
def background(name):
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)
    threading.Thread(target=spin, daemon=True).start()
"""


@pytest.mark.slow
async def test_a_parent_that_does_not_read_stops_no_limit(tight: Sandbox) -> None:
    process = await tight._process(session=True)
    await process._send(encode_request(f"{SPIN}\nbackground(b'unread')\nprint(chr(0) * 60_000)", "", 60))
    await until(lambda: processes_called("unread") == 1)
    await until(lambda: processes_called("unread") == 0)
    assert len((await process._receive())["stdout"]) == 60_001
    await process.end()


async def test_a_cell_that_is_never_read_does_not_block_its_sender(tight: Sandbox) -> None:
    """The cell before it pretends to be done and keeps running."""
    async with tight.session() as session:
        await session.run("import ctypes, os, time\nctypes.CDLL(None).prctl(15, b'deaf', 0, 0, 0)")
        assert (await session.run("os.write(3, b'o')\ntime.sleep(1000)")).ok
        with anyio.move_on_after(0.2):
            await session.run(f"# {'x' * 5_000_000}")
        assert processes_called("deaf") == 0


@pytest.mark.slow
async def test_subprocesses_use_the_processor_time_of_their_session() -> None:
    try:
        async with open_box("bubblewrap", limits=SandboxLimits(cpu_seconds=0.5, wall_seconds=60)) as box:
            fork = (
                f"{SPIN}\nctypes.CDLL(None).prctl(15, b'forked', 0, 0, 0)\nif os.fork() == 0 and os.fork() == 0: spin()"
            )
            async with box.session() as session:
                assert (await session.run(fork)).ok
                await until(lambda: processes_called("forked") == 0)
                assert "between two runs" in (await session.run("1")).note
            assert (await box.run(f"{fork}\nimport time\ntime.sleep(1000)")).outcome == "timeout"
    except SandboxUnavailable as error:
        pytest.skip(str(error))


async def test_input_that_cannot_be_given_is_named(safe: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LARGEST", 10_000)
    with pytest.raises(SandboxInput, match=r"stdin: character 2 is '\\ud800'.*decode"):
        await safe.run("1", stdin="ab\ud800")
    assert (await safe.run("import os; print(os.read(0, 9))", stdin="\udcff")).stdout == "b'\\xff'\n"
    with pytest.raises(SandboxInput, match=r"stdin: \d+ characters are too long .*give less"):
        await safe.run("1", stdin="x" * frames.LARGEST)
    assert issubclass(SandboxInput, ValueError)
    async with safe.session() as session:
        for result in (await safe.run("#" * frames.LARGEST), await session.run("#" * frames.LARGEST)):
            assert (result.outcome, result.stderr) == ("error", f"the code is too long: {frames.LARGEST} characters\n")
        assert (await session.run("1")).ok


async def test_a_run_does_not_wait_for_a_process_that_ended_while_its_session_was_closed() -> None:
    ours, theirs = socket.socketpair()
    process, outcomes = Process(ours), list[Outcome]()

    async def run() -> None:
        outcomes.append((await process.ask(b"code", 1000)).outcome)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.wait_all_tasks_blocked()
            theirs.close()
            await process.end()  # it reads the end before the run does
    assert outcomes == ["killed"]
