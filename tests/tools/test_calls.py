"""Calling tools: good calls, and every way in which a call can fail."""

import contextvars
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import PluginError, ToolFailure
from agentrl.tools import OutcomeKind, Tool, Toolbox, ToolError, ToolOutcome, tool
from agentrl.tools.threads import ToolThreads
from tests.support.virtual_time import virtual_time


@tool
def add(x: int, y: int = 2, mode: Literal["plain", "loud"] = "plain", names: list[int] | None = None) -> Any:
    """Add."""
    return x + y


@tool
async def echo(text: str) -> str:
    """Echo."""
    await anyio.lowlevel.checkpoint()
    return text


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE")
BOX = Toolbox([add, echo])


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
async def test_integers_pass_through_exactly(x: int, y: int) -> None:
    assert await add.call({"x": x, "y": y}) == str(x + y)


@given(st.text())
async def test_text_passes_through_exactly(text: str) -> None:
    outcome = await BOX.run("echo", {"text": text})
    assert (outcome.text, outcome.kind) == (text, OutcomeKind.OK)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["add", "echo", "ad", ""]), JSON)
async def test_any_json_is_answered_and_never_raises(name: str, arguments: Any) -> None:
    outcome = await BOX.run(name, arguments)
    assert outcome.ok or outcome.text.startswith("Error: ")
    assert "Traceback" not in outcome.text
    assert outcome.seconds >= 0


@given(st.text())
async def test_any_text_as_arguments_is_answered(text: str) -> None:
    outcome = await BOX.run("echo", text)
    assert outcome.ok or outcome.kind is OutcomeKind.BAD_ARGUMENTS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": "abc"}, "argument `x`: expected integer, got 'abc'"),
        ({"x": 1.5}, "argument `x`: input should be a valid integer, got a number with a fractional part, got 1.5"),
        ({"x": None}, "argument `x`: expected integer, got None"),
        ({}, "argument `x` is missing (expected integer)"),
        ({"x": 1, "z": 2}, "unknown argument `z`; the arguments of `add` are `x`, `y`, `mode`, `names`"),
        ({"x": 1, "mode": "big"}, "argument `mode`: expected 'plain' or 'loud', got 'big'"),
        ({"x": 1, "names": [1, "a"]}, "argument `names[1]`: input should be a valid integer, "),
        ({"x": "a" * 500}, "argument `x`: expected integer, got 'aaa"),
        ({"y": 1, "z": 2}, "argument `x` is missing (expected integer); unknown argument `z`"),
        ('{"x": 1', "the arguments are not valid JSON: Expecting ',' delimiter at character 7"),
        ("[1]", "the arguments must be a JSON object, got [1]"),
        ([1], "the arguments must be a JSON object, got [1]"),
        ("[" * 100_000, "the arguments are nested too deeply"),
        (f'{{"x": {"1" * 5000}}}', "the arguments are nested too deeply, or contain a number of too many"),
    ],
)
async def test_bad_arguments(arguments: Any, message: str) -> None:
    outcome = await BOX.run("add", arguments)
    assert outcome.kind is OutcomeKind.BAD_ARGUMENTS
    assert outcome.text.startswith(f"Error: {message}")
    assert len(outcome.text) < 300


async def test_unknown_tool_lists_and_suggests() -> None:
    outcome = await BOX.run("ecko", {})
    assert outcome.kind is OutcomeKind.UNKNOWN_TOOL
    assert outcome.text == "Error: unknown tool `ecko`; did you mean `echo`? the tools are `add`, `echo`"
    assert (await Toolbox().run("f", {})).text == "Error: unknown tool `f`; the tools are none"


async def test_json_text_and_convertible_values_are_accepted() -> None:
    assert (await BOX.run("add", '{"x": "3", "y": 4}')).text == "7"
    assert (await BOX.run("add", {"x": 3})).text == "5"


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_exceptions_become_text_without_traceback(asynchronous: bool) -> None:
    def sync(kind: str) -> str:
        """Fail."""
        raise {"key": KeyError("k"), "bare": ValueError(), "own": ToolError("no such page"), "late": TimeoutError()}[
            kind
        ]

    async def later(kind: str) -> str:
        """Fail."""
        return sync(kind)

    box = Toolbox([tool(name="fail")(later if asynchronous else sync)])
    texts = {kind: await box.run("fail", {"kind": kind}) for kind in ("key", "bare", "own", "late")}
    assert {texts[name].kind for name in ("key", "bare", "late")} == {OutcomeKind.RAISED}
    assert texts["own"].kind is OutcomeKind.REFUSED
    assert texts["key"].text == "Error: KeyError: 'k'"
    assert texts["bare"].text == "Error: ValueError"
    assert texts["own"].text == "Error: no such page"
    assert texts["late"].text == "Error: TimeoutError"
    with pytest.raises(ToolError, match="no such page"):
        await next(iter(box)).call({"kind": "own"})


@virtual_time
async def test_a_hanging_async_tool_meets_its_deadline() -> None:
    cancelled = []

    @tool(timeout=0.02)
    async def hang() -> str:
        """Hang."""
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(True)
        return ""

    outcome = await hang.run({})
    assert (outcome.kind, outcome.text) == (OutcomeKind.TIMEOUT, "Error: `hang` did not finish within 0.02 s")
    assert cancelled == [True]


async def test_a_hanging_sync_tool_meets_its_deadline_and_does_not_block_the_loop() -> None:
    release = threading.Event()

    @tool(timeout=0.05)
    def hang() -> str:
        """Hang."""
        release.wait(10)
        return ""

    with anyio.fail_after(120):
        outcome = await hang.run({})
    release.set()
    assert outcome.kind is OutcomeKind.TIMEOUT
    assert outcome.seconds >= 0.05


async def test_sync_tools_run_outside_the_loop_thread() -> None:
    @tool
    def where() -> int:
        """Where."""
        return threading.get_ident()

    assert await where.call({}) != str(threading.get_ident())


@virtual_time
async def test_cancelling_from_outside_is_not_swallowed() -> None:
    @tool
    async def hang() -> str:
        """Hang."""
        await anyio.sleep_forever()
        return ""

    with anyio.move_on_after(0.02) as scope:
        await hang.run({})
    assert scope.cancelled_caught


@dataclass
class Row:
    name: str
    score: float


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("text", "text"),
        ("", ""),
        (3, "3"),
        (2.5, "2.5"),
        (True, "true"),
        (["a", {"b": None}], '["a",{"b":null}]'),
        (Row("é", 1.0), '{"name":"é","score":1.0}'),
    ],
)
async def test_results_that_can_be_shown(value: Any, text: str) -> None:
    assert await Tool(lambda: value, name="give").call({}) == text


@pytest.mark.parametrize("value", [None, object(), b"raw", [object()], iter("ab"), (letter for letter in "ab")])
async def test_results_that_cannot(value: Any) -> None:
    outcome = await Tool(lambda: value, name="give").run({})
    assert outcome.kind is OutcomeKind.BAD_RESULT
    assert outcome.text == f"Error: `give` returned {type(value).__name__}; expected text, a number or a JSON value"


async def test_long_output_is_cut_with_a_note() -> None:
    @tool(max_output_chars=10)
    def long() -> str:
        """Long."""
        return "x" * 25

    assert await long.call({}) == "x" * 10 + "\n[15 more characters cut]"


def test_a_tool_that_never_returns_does_not_keep_the_process_alive() -> None:
    code = """
import threading, anyio
from agentrl.tools import tool

@tool(timeout=0.05)
def hang() -> str:
    "Hang."
    threading.Event().wait()
    return ""

print(anyio.run(hang.run, {}).kind)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == "timeout"


async def test_waiting_for_a_free_thread_does_not_count_against_the_deadline() -> None:
    limiter = ToolThreads.current().places
    release, started = threading.Event(), threading.Event()

    @tool(timeout=30)
    def block() -> str:
        """Block."""
        started.set()
        release.wait(30)
        return "blocked"

    @tool(timeout=2)
    def quick() -> str:
        """Be quick."""
        return "quick"

    outcomes: dict[str, str] = {}

    async def run(entry: Tool) -> None:
        outcomes[entry.name] = (await entry.run({})).text

    before, limiter.total_tokens = limiter.total_tokens, 1
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(run, block)
            while not started.is_set():
                await anyio.lowlevel.checkpoint()
            group.start_soon(run, quick)
            await anyio.sleep(2.5)  # longer than the quick tool's deadline
            release.set()
    finally:
        limiter.total_tokens = before
    assert outcomes == {"block": "blocked", "quick": "quick"}


async def test_context_variables_reach_a_sync_tool() -> None:
    @tool
    def read() -> str:
        """Read."""
        return VARIABLE.get()

    VARIABLE.set("seen")
    assert await read.call({}) == "seen"


async def test_at_most_so_many_calls_run_at_once() -> None:
    running, most = 0, 0

    @tool(max_concurrency=2)
    async def narrow(number: int) -> int:
        """Count who is here."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        running -= 1
        return number

    outcomes: list[ToolOutcome] = []

    async def one(number: int) -> None:
        outcomes.append(await narrow.run({"number": number}))

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(one, number)
    assert most == 2
    assert {outcome.kind for outcome in outcomes} == {OutcomeKind.OK}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("raise", "tool_raised"), ("hang", "tool_timeout"), ("nonsense", "tool_bad_result")],
)
@virtual_time
async def test_a_tools_own_failure_can_end_the_trajectory(fault: str, kind: str) -> None:
    @tool(on_failure="fail", timeout=0.05)
    async def shaky(number: int) -> object:
        """Fail as told."""
        if fault == "raise":
            raise OSError("down")
        if fault == "hang":
            await anyio.sleep_forever()
        return b"bytes"

    with pytest.raises(ToolFailure, match="tool `shaky`") as caught:
        await Toolbox([shaky]).run("shaky", {"number": 1})
    assert caught.value.kind == kind
    assert (await Toolbox([shaky]).run("shaky", {"number": "x"})).kind is OutcomeKind.BAD_ARGUMENTS


async def test_what_a_tool_tells_the_model_or_the_run_is_passed_on() -> None:
    @tool(on_failure="fail")
    async def wordy(fatal: bool) -> str:
        """Refuse, or give up."""
        if fatal:
            raise ToolFailure("the index is gone", kind="tool_index")
        raise ToolError("use another word")

    refused = await wordy.run({"fatal": False})
    assert (refused.kind, refused.text) == (OutcomeKind.REFUSED, "Error: use another word")
    with pytest.raises(ToolFailure, match="the index is gone"):
        await wordy.run({"fatal": True})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_concurrency": 0}, "positive `max_concurrency`"), ({"on_failure": "ignore"}, "'observe' or 'fail'")],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    def named() -> str:
        return "x"

    with pytest.raises(PluginError, match=message):
        tool(**options)(named)
