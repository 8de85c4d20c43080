"""The tool `python`: its output for the model, the session of its variables, and the end with the environment."""

import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from agentrl.chat import ToolCall
from agentrl.envs import Environment, Turn
from agentrl.envs.load import check_environment
from agentrl.errors import PluginError
from agentrl.sample import Sample
from agentrl.sandbox import Sandbox, SandboxLimits, SandboxUnavailable
from agentrl.tools import OutcomeKind, Toolbox
from agentrl.tools.python import WithPython, python_tool
from tests.sandbox.watch import processes_called


def call(code: str) -> ToolCall:
    return ToolCall("1", "python", {"code": code})


class Solver(WithPython, Environment):
    """Uses Python."""

    max_turns = 3

    @classmethod
    def make_sandbox(cls, args: Any) -> Sandbox:
        return Sandbox(preload=(), warm=0, limits=SandboxLimits(wall_seconds=3), queue_seconds=20)


class Forgetful(Solver):
    python = python_tool(stateful=False, timeout=0.5, max_output_chars=80)


@pytest.fixture
async def solver() -> AsyncIterator[type[Solver]]:
    try:
        await Solver.setup(None)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield Solver
    await Solver.teardown()


async def say(env: Environment, code: str) -> tuple[str, OutcomeKind]:
    outcome = await env.toolbox.run("python", {"code": code}, state=env)
    return outcome.text, outcome.kind


def test_the_schema_has_one_argument() -> None:
    check_environment(Solver)
    (schema,) = Solver.create().toolbox.schemas
    assert schema["function"]["name"] == "python"
    assert schema["function"]["parameters"]["properties"] == {"code": {"type": "string"}}
    assert schema["function"]["parameters"]["required"] == ["code"]
    assert "stay" in schema["function"]["description"]
    assert "Nothing is kept" in Forgetful.create().toolbox.schemas[0]["function"]["description"]


async def test_each_trajectory_has_its_own_variables(solver: type[Solver]) -> None:
    one, two = solver.create(), solver.create()
    assert await say(one, "x = 20\nx + 1") == ("21", OutcomeKind.OK)
    assert await say(one, "x * 2") == ("40", OutcomeKind.OK)
    text, kind = await say(two, "x")
    assert kind is OutcomeKind.RAISED
    assert text.endswith("NameError: name 'x' is not defined")
    await one.close()
    assert (await say(one, "x"))[1] is OutcomeKind.RAISED
    await one.close()
    await two.close()


@dataclass
class Sized(Solver):
    """Without a hash, and equal to all others of its size."""

    size: int = 3


async def test_environments_that_are_equal_and_have_no_hash(solver: type[Solver]) -> None:
    Sized.sandbox = solver.sandbox
    one, two = Sized.create(), Sized.create()
    assert one == two
    assert (await say(one, "x = 1"))[1] is OutcomeKind.OK
    assert (await say(two, "x"))[1] is OutcomeKind.RAISED
    assert await say(one, "x") == ("1", OutcomeKind.OK)
    await one.close()
    sessions = Sized.python._sessions
    assert list(sessions) == [id(two)]
    del two
    gc.collect()
    assert not sessions, "an environment that is gone leaves no session"


async def test_what_the_model_reads(solver: type[Solver]) -> None:
    env = solver.create()
    assert await say(env, "y = 1") == ("[no output]", OutcomeKind.OK)
    text, _ = await say(env, "print('before')\ndef f():\n    raise KeyError('k')\nf()")
    assert text.splitlines() == [
        "Error: the code failed",
        "before",
        "Traceback (most recent call last):",
        '  File "<cell 2>", line 4, in <module>',
        "    f()",
        '  File "<cell 2>", line 3, in f',
        "    raise KeyError('k')",
        "KeyError: 'k'",
    ]
    text, kind = await say(env, "while True: pass")
    assert (text, kind) == ("Error: the code ran out of time and was stopped", OutcomeKind.TIMEOUT)
    text, _ = await say(env, "y")
    assert "the session was restarted after: timeout; earlier variables are gone" in text
    assert (await say(env, "bytearray(1 << 40)"))[0].startswith("Error: the code ran out of memory\n")
    assert (await env.toolbox.run("python", {"program": "1"}, state=env)).kind is OutcomeKind.BAD_ARGUMENTS
    await env.close()


async def test_long_output_loses_its_middle(solver: type[Solver]) -> None:
    env = solver.create()
    text, kind = await say(env, "print('a' * 6000 + 'z' * 6000)")
    assert kind is OutcomeKind.OK
    assert len(text) <= solver.python.max_output_chars
    assert text.startswith("aaa")
    assert text.endswith("zzz")
    assert "characters left out" in text
    await env.close()


async def test_a_turn_runs_its_calls_and_counts_their_time(solver: type[Solver]) -> None:
    env = solver.create()
    turn = Turn(
        1, "", "", tool_calls=[call("import time; time.sleep(0.2); a = 1"), call("print('b')")], sample=Sample()
    )
    step = await env.step(turn)
    assert [message["content"] for message in step.messages] == ["[no output]", "b"]
    assert step.info["tool_ok"] == 2
    assert step.info["tool_seconds"] >= 0.2
    await env.close()


async def test_closing_the_environment_ends_the_process(solver: type[Solver]) -> None:
    env = solver.create()
    await say(env, "import ctypes; ctypes.CDLL(None).prctl(15, b'an-agent', 0, 0, 0)")
    assert processes_called("an-agent") == 1
    with anyio.CancelScope() as scope:  # environments of cancelled trajectories are closed too
        scope.cancel()
        await env.close()
    assert processes_called("an-agent") == 0


async def test_a_cancelled_call_ends_its_process(solver: type[Solver]) -> None:
    env = solver.create()
    with anyio.move_on_after(0.5):
        await say(env, "import ctypes; ctypes.CDLL(None).prctl(15, b'an-agent', 0, 0, 0)\nwhile True: pass")
    assert processes_called("an-agent") == 0
    await env.close()


async def test_without_state_every_call_is_alone() -> None:
    try:
        await Forgetful.setup(None)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    env = Forgetful.create()
    assert (await say(env, "x = 1"))[1] is OutcomeKind.OK
    assert (await say(env, "x"))[1] is OutcomeKind.RAISED
    text, _ = await say(env, "print('b' * 500)")
    assert len(text) <= 80
    assert (await say(env, "import time; time.sleep(2)"))[1] is OutcomeKind.TIMEOUT
    await env.close()
    await Forgetful.teardown()
    assert Solver.sandbox is None


async def test_with_a_sandbox_of_ones_own() -> None:
    try:
        async with Sandbox(preload=()) as box:
            single = Toolbox([python_tool(box, stateful=False)])
            assert (await single.run("python", {"code": "print(6 * 7)"})).text == "42"
            shared = Toolbox([python_tool(box)])
            refused = await shared.run("python", {"code": "1"})
            assert "pass `state`" in refused.text
    except SandboxUnavailable as error:
        pytest.skip(str(error))


async def test_a_tool_without_an_open_sandbox_stops_the_run_and_says_what_to_do() -> None:
    with pytest.raises(SandboxUnavailable, match="let the environment inherit from WithPython and call its `setup`"):
        await Solver.create().toolbox.run("python", {"code": "1"}, state=Solver.create())
    env = Solver.create()
    with pytest.raises(SandboxUnavailable, match="WithPython"):
        await env.step(Turn(1, "", "", tool_calls=[call("1"), call("2")], sample=Sample()))
    toolbox = Toolbox([python_tool(Sandbox(preload=()), stateful=False)])
    with pytest.raises(SandboxUnavailable, match="the sandbox is not open"):
        await toolbox.run("python", {"code": "1"})


def test_with_python_behind_environment_is_refused() -> None:
    class Swapped(Environment, WithPython):
        pass

    said = "Swapped: put its base WithPython before Environment; behind it, WithPython.setup is not called"
    with pytest.raises(PluginError, match=said):
        check_environment(Swapped)
