import contextlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import GraderFailure, SettingsError
from agentrl.rm_hub import Grade, GraderRunner, RmHubSettings, grade, grade_many
from agentrl.rm_hub.registry import exhausted, find
from agentrl.rm_hub.running.runner import Item
from tests.engine.faults import until
from tests.support.nightly import nightly

FAULTY = str(Path(__file__).parent.parent / "support" / "faulty_graders.py")


def faulty(name: str) -> str:
    return f"{FAULTY}:{name}"


def graders(processes: int = 1, preload: Sequence[str] = (), **settings: Any) -> GraderRunner:
    """Make a runner. Settings are named without `grader_`, and may be smaller than users' minimum."""
    named = {f"grader_{name}": value for name, value in {"processes": processes, **settings}.items()}
    return GraderRunner(RmHubSettings().model_copy(update=named), preload=preload)


async def kind_of(pool: GraderRunner, rm_type: str, response: str = "") -> str:
    with pytest.raises(GraderFailure) as caught:
        await pool.grade(rm_type, response, "x")
    return caught.value.kind


async def test_the_same_grade_as_in_this_process() -> None:
    async with graders() as pool:
        for answer in ("The Paris.", "London", "", "Par\ud800is", "Par\x00is"):
            assert await pool.grade("exact_match", answer, ["Paris", "Rome"]) == grade(
                "exact_match", answer, ["Paris", "Rome"]
            )


async def test_text_comes_back_as_it_was() -> None:
    texts = [
        "",
        "a" * 300_000,
        "é😀" * 100_000,
        "\ud800\udfff\udc00",
        "\x00\n\r\u2028",
        "\ud83d" + "x" * 131_071 + "\ude00",
    ]
    async with graders() as pool:
        for text in texts:
            got = await pool.grade(faulty("echo"), text, text)
            assert got.correct
            assert (got.extracted or "")[:1000] == text[:1000]


@pytest.mark.parametrize(
    ("name", "kind"),
    nightly(
        [
            ("spins_in_c", "grader_timeout"),
            ("segfaults", "grader_crashed"),
            ("gives_nan", "grader_bad_grade"),
            ("raises", "grader_raised"),
            ("sleeps", "grader_timeout"),
            ("exits", "grader_crashed"),
            ("hogs", "grader_out_of_memory"),
            ("gives_number", "grader_bad_grade"),
        ],
        2,
    ),
)
async def test_a_bad_item_gets_a_typed_failure_and_the_next_one_is_graded(name: str, kind: str) -> None:
    async with graders(timeout=1 if kind == "grader_timeout" else 30) as pool:
        assert await kind_of(pool, faulty(name), "60") == kind
        assert (await pool.grade("exact_match", "a", "a")).correct


LONG = "a" * 3_999_999 + "!"
"""A built-in grader's task that takes more than a second."""


@contextlib.asynccontextmanager
async def one_worker(**options: Any) -> AsyncIterator[tuple[GraderRunner, int]]:
    """Yield a pool of one worker, with the worker's number."""
    async with graders(preload=["f1", faulty("says_pid")], **options) as pool:
        yield pool, int((await pool.grade(faulty("says_pid"), "", "")).score)


async def test_an_answer_that_takes_all_memory_is_wrong() -> None:
    async with one_worker(memory_mb=4) as (pool, _):
        got = await pool.grade("f1", LONG, "x")
        assert (got.score, got.correct, got.unjudged) == (0.0, False, "grader_out_of_memory")
        assert "--grader-memory-mb" in got.reason
        assert (await pool.grade("f1", "a", "a")).correct


async def test_an_answer_that_takes_all_time_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine a worker may not get enough CPU time to exceed its limit.
    monkeypatch.setattr("agentrl.rm_hub.running.pool.STARVED", 0.01)
    async with one_worker(timeout=0.5) as (pool, _):
        got = await pool.grade("f1", LONG, "x")
        assert (got.score, got.correct, got.unjudged) == (0.0, False, "grader_timeout")
        assert "longer than 0.5 s" in got.reason
        with anyio.fail_after(120):
            while not (await pool.grade("f1", "a", "a")).correct:
                await anyio.lowlevel.checkpoint()


@pytest.mark.slow
async def test_a_worker_without_processor_time_is_the_machines_fault() -> None:
    async with one_worker(timeout=2) as (pool, pid):
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(GraderFailure, match=r"with 0.0 s of processor time") as caught:
            await pool.grade("f1", "a", "a")
        assert caught.value.kind == "grader_timeout"


@pytest.mark.parametrize(("number", "blamed"), [(signal.SIGSEGV, True), (signal.SIGKILL, False)])
async def test_a_crash_is_the_answers_fault_and_a_kill_from_outside_is_not(number: int, blamed: bool) -> None:
    outcomes: list[Grade | GraderFailure] = []
    async with one_worker() as (pool, pid):

        async def ask() -> None:
            try:
                outcomes.append(await pool.grade("f1", LONG, "x"))
            except GraderFailure as failure:
                outcomes.append(failure)

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            os.kill(pid, number)
    [outcome] = outcomes
    assert isinstance(outcome, Grade) == blamed
    assert (outcome.unjudged if isinstance(outcome, Grade) else outcome.kind) == "grader_crashed"


def test_what_an_exhausted_grader_gives() -> None:
    late = GraderFailure("late", kind="grader_timeout")
    assert exhausted(find("math"), late) == Grade(0.0, False, None, "late", unjudged="grader_timeout")
    assert exhausted(find("dapo"), late).score == grade("dapo", "Answer: 1", "2").score == -1.0
    with pytest.raises(GraderFailure, match="late"):
        exhausted(find(faulty("sleeps")), late)


@pytest.mark.slow
async def test_neighbours_of_bad_items_notice_nothing() -> None:
    names = ["spins_in_c", "segfaults", "exits", "raises"]
    good: list[bool] = []
    bad: list[str] = []
    async with graders(2, timeout=3) as pool:

        async def fine() -> None:
            good.append((await pool.grade("exact_match", "a", "a")).correct)

        async def faulted(name: str) -> None:
            bad.append(await kind_of(pool, faulty(name)))

        async with anyio.create_task_group() as group:
            for i in range(60):
                group.start_soon(fine)
                if i % 15 == 0:
                    group.start_soon(faulted, names[i // 15])
    assert good == [True] * 60
    assert sorted(bad) == ["grader_crashed", "grader_crashed", "grader_raised", "grader_timeout"]


@pytest.mark.slow
async def test_a_process_with_thousands_of_open_descriptors_grades() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.dup(0))
        async with graders(timeout=1) as pool:
            assert (await pool.grade("exact_match", "a", "a")).correct
            assert await kind_of(pool, faulty("sleeps"), "60") == "grader_timeout"
            assert (await pool.grade("exact_match", "a", "a")).correct


@pytest.mark.slow
async def test_items_start_in_the_order_in_which_they_came() -> None:
    order: list[int] = []
    async with graders() as pool:

        async def one(number: int) -> None:
            await pool.grade("exact_match", "a", "a")
            order.append(number)

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(one, number)
    assert order == list(range(20))


@pytest.mark.slow
async def test_waiting_in_the_queue_does_not_count_against_the_deadline() -> None:
    async with graders(timeout=2.0) as pool, anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(pool.grade, faulty("sleeps"), "0.6")


async def test_waiting_too_long_for_a_worker_is_a_timeout() -> None:
    async with graders(timeout=5, total_timeout=0.2) as pool, anyio.create_task_group() as group:
        await pool.grade(faulty("sleeps"), "0")
        group.start_soon(pool.grade, faulty("sleeps"), "1")
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(GraderFailure, match="--grader-processes") as caught:
            await pool.grade("exact_match", "a", "a")
    assert caught.value.kind == "grader_timeout"


async def test_a_cancelled_caller_leaves_a_pool_that_works() -> None:
    async with graders() as pool:
        with anyio.move_on_after(0.5):
            await pool.grade(faulty("sleeps"), "60")
        with anyio.fail_after(120):
            assert (await pool.grade("exact_match", "a", "a")).correct


@pytest.mark.slow
async def test_the_worker_of_a_cancelled_caller_is_killed(tmp_path: Path) -> None:
    async with graders() as pool:
        async with anyio.create_task_group() as group:
            group.start_soon(pool.grade, faulty("starts_a_process"), str(tmp_path / "pid"))
            await until(lambda: (tmp_path / "pid").is_file() and bool((tmp_path / "pid").read_text()))
            group.cancel_scope.cancel()
        assert gone(int((tmp_path / "pid").read_text()))


async def test_workers_are_replaced_so_that_leaks_do_not_pile_up() -> None:
    async with graders(recycle=5) as pool:
        leaked = [(await pool.grade(faulty("leaks"), "", "")).score for _ in range(12)]
        assert leaked == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
        assert pool.pool.started == 3


@pytest.mark.slow
async def test_killed_processes_are_replaced() -> None:
    async with graders() as pool:
        for _ in range(3):
            pid = int((await pool.grade(faulty("says_pid"), "", "")).score)
            os.kill(pid, 9)
            assert gone(pid)
            assert (await pool.grade("exact_match", "a", "a")).correct


@pytest.mark.slow
async def test_what_a_killed_grader_had_started_is_killed_too(tmp_path: Path) -> None:
    async with graders(timeout=3) as pool:
        assert await kind_of(pool, faulty("starts_a_process"), str(tmp_path / "pid")) == "grader_timeout"
        assert (await pool.grade("exact_match", "a", "a")).correct
    assert gone(int((tmp_path / "pid").read_text()))


async def test_closing_ends_every_process_and_answers_those_who_wait() -> None:
    kinds: list[str] = []
    pool = graders(2)
    async with anyio.create_task_group() as group:
        pid = int((await pool.grade(faulty("says_pid"), "", "")).score)

        async def one() -> None:
            kinds.append(await kind_of(pool, faulty("sleeps"), "60"))

        for _ in range(4):
            group.start_soon(one)
        await anyio.wait_all_tasks_blocked()
        pool.pool.close()
    assert kinds == ["grader_closed"] * 4
    assert gone(pid)
    assert await kind_of(pool, "exact_match") == "grader_closed"


def test_processes_die_with_the_one_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, signal, anyio
        from agentrl.rm_hub import GraderRunner, RmHubSettings

        async def main():
            async with GraderRunner(RmHubSettings(grader_processes=1)) as pool:
                print(int((await pool.grade({faulty("says_pid")!r}, "", "")).score), flush=True)
                async with anyio.create_task_group() as group:
                    group.start_soon(pool.grade, {faulty("spins_in_c")!r}, "", "")
                    await anyio.sleep(0.1)
                    os.kill(os.getpid(), signal.SIGKILL)

        print("main ran", flush=True)
        anyio.run(main)
        """)
    )
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == -9
    said, pid = run.stdout.split("\n")[:2]
    assert said == "main ran"
    assert run.stdout.count("main ran") == 1  # workers do not import the script
    assert gone(int(pid))


async def test_too_much_is_refused_by_name() -> None:
    async with graders() as pool:
        got = await pool.grade("exact_match", "a" * 5_000_000, "a")
        assert (got.score, got.unjudged) == (0.0, "grader_too_large")
        with pytest.raises(GraderFailure, match="label and metadata") as caught:
            await pool.grade("exact_match", "a", ["a" * 3_000_000])
        assert caught.value.kind == "grader_too_large"
        assert pool.pool.started == 0


async def test_labels_must_be_plain_and_other_metadata_stays_behind() -> None:
    async with graders() as pool:
        with pytest.raises(GraderFailure, match="the label must be plain JSON") as caught:
            await pool.grade("exact_match", "a", {"a"})
        assert caught.value.kind == "grader_bad_label"
        deep: list[object] = []
        for _ in range(100_000):
            deep = [deep]
        got = await pool.grade(faulty("echo"), "a", "a", {"env": object(), "n": 3, "deep": deep, "counters": {}})
        assert got.reason == "{'n': 3}"


@pytest.mark.slow
async def test_graders_that_read_the_conversation_get_it() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    label = {"name": "f", "arguments": {"x": 1}}
    assert grade("tool_call", "", label, {"messages": messages}).correct
    async with graders() as pool:
        assert (await pool.grade("tool_call", "", label, {"messages": messages})).correct


async def test_unknown_graders_are_refused() -> None:
    async with graders() as pool:
        with pytest.raises(SettingsError, match="did you mean 'exact_match'"):
            await pool.grade("exact_mach", "a", "a")
    with pytest.raises(SettingsError, match="did you mean"):
        graders(preload=["exact_mach"])


async def test_a_grader_whose_library_is_missing_says_so(tmp_path: Path) -> None:
    file = tmp_path / "needy.py"
    file.write_text(
        "import os\nif os.environ.get('OMP_NUM_THREADS') == '1' and os.getppid() != PARENT:\n".replace(
            "PARENT", str(os.getppid())
        )
        + "    import surely_not_installed\ndef needy(response, label, metadata): ...\n"
    )
    async with graders() as pool:
        with pytest.raises(GraderFailure, match="surely_not_installed") as caught:
            await pool.grade(f"{file}:needy", "a")
        assert caught.value.kind == "grader_unavailable"


@given(st.lists(st.tuples(st.text(st.characters(), max_size=30), st.text(max_size=8)), max_size=8))
def test_encoding_round_trips(pairs: list[tuple[str, str]]) -> None:
    import io

    from agentrl.rm_hub.running import worker

    for text, label in pairs:
        sent = b"".join(worker.request("f1", text, [label], {"k": text}, conversation=False))
        assert worker.read_request(io.BytesIO(sent)) == {
            "rm_type": "f1",
            "response": text,
            "label": [label],
            "metadata": {"k": text},
        }
        outcome = Grade(0.5, False, text, label, {"a": 1.0})
        assert worker.read_reply(worker.reply(outcome)) == outcome


@pytest.mark.slow
def test_grade_many_from_a_script() -> None:
    seen: list[int] = []
    items: list[Item] = [("a", "a"), ("b", "a", {"n": 1}), {"response": "a", "label": ["b", "a"]}, ("a", None)]
    *graded, failed = grade_many("exact_match", items, processes=2, progress=seen.append)
    assert [isinstance(g, Grade) and g.correct for g in graded] == [True, False, True]
    assert isinstance(failed, GraderFailure)
    assert failed.kind == "grader_no_label"
    assert seen == [1, 2, 3, 4]
    assert grade_many("exact_match", []) == []


def test_grade_many_has_a_deadline_for_each() -> None:
    outcomes = grade_many(faulty("sleeps"), [("0", None), ("60", None), ("0", None)], processes=2, timeout=0.5)
    assert [getattr(o, "kind", "graded") for o in outcomes] == ["graded", "grader_timeout", "graded"]


async def test_grade_many_inside_a_running_loop_and_for_graders_that_wait() -> None:
    outcomes = grade_many(faulty("waits"), [("0", None), ("x", None)])
    assert [getattr(o, "kind", "graded") for o in outcomes] == ["graded", "grader_raised"]


def test_grade_many_refuses_an_unknown_grader() -> None:
    with pytest.raises(SettingsError, match="did you mean 'exact_match'"):
        grade_many("exact_mach", [("a", "b")])


def gone(pid: int) -> bool:
    """Return true if a process has ended, or ends within ten seconds."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    import select

    try:
        return bool(select.select([pidfd], [], [], 10.0)[0])
    finally:
        os.close(pidfd)
