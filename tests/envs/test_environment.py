"""The Environment's defaults: reset, running tool calls, counting, rewards."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from agentrl.chat import ToolCall
from agentrl.envs import Environment, Step, Turn
from agentrl.errors import AgentRLError, PluginError, SettingsError
from agentrl.sample import Sample, Status
from agentrl.tools import tool


def call(name: str, arguments: dict[str, Any] | str | None = None, id_: str = "call_0") -> ToolCall:
    return ToolCall(id_, name, {} if arguments is None else arguments)


class Meeting(Environment):
    """Two calls of `meet` finish only if they run at the same time; the later call is released first."""

    max_turns = 2

    def __init__(self) -> None:
        self.first, self.second = anyio.Event(), anyio.Event()
        self.closed = False

    @tool
    async def meet(self, who: str) -> str:
        """Meet."""
        if who == "first":
            self.first.set()
            await self.second.wait()
        else:
            await self.first.wait()
            self.second.set()
        return who

    @tool
    def fail(self) -> str:
        """Fail."""
        raise RuntimeError("broken pipe")


def turn(*calls: ToolCall, broken: tuple[str, ...] = ()) -> Turn:
    return Turn(0, "text", "content", tool_calls=calls, broken=broken)


async def test_reset_shows_the_prompt() -> None:
    env = Environment()
    assert await env.reset(Sample(prompt="Hi")) == [{"role": "user", "content": "Hi"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    sample = Sample(prompt=messages)
    got = await env.reset(sample)
    assert got == messages
    got.append({"role": "user", "content": "more"})
    assert sample.prompt == messages, "the sample's own prompt must not grow"


async def test_a_turn_without_calls_ends_the_trajectory() -> None:
    assert await Environment().step(turn()) == Step(done=True)


async def test_calls_run_side_by_side_and_results_keep_the_order() -> None:
    env = Meeting.create(SimpleNamespace(x=1))
    with anyio.fail_after(120):
        step = await env.step(turn(call("meet", {"who": "first"}, "a"), call("meet", {"who": "second"}, "b")))
    assert step.messages == [
        {"role": "tool", "tool_call_id": "a", "name": "meet", "content": "first"},
        {"role": "tool", "tool_call_id": "b", "name": "meet", "content": "second"},
    ]
    assert not step.done
    assert {key: value for key, value in step.info.items() if key != "tool_seconds"} == {"tool_calls": 2, "tool_ok": 2}
    assert step.info["tool_seconds"] > 0
    assert env.args.x == 1


async def test_a_step_can_be_made_the_last_with_what_its_tools_said() -> None:
    step = replace(
        await Environment().step(turn()), messages=[{"role": "tool", "content": "won"}], info={"calls": 1}, done=False
    )
    assert step.finish(1.0) == Step(step.messages, reward=1.0, done=True, info={"calls": 1})
    assert replace(step, reward=0.5).finish() == Step(step.messages, reward=0.5, done=True, info={"calls": 1})


async def test_every_kind_of_failure_is_shown_and_counted() -> None:
    step = await Meeting().step(
        turn(
            call("fail"), call("nobody"), call("meet", {"whom": "x"}), call("fail", "{"), broken=("no name", "cut off")
        )
    )
    texts = [message["content"] for message in step.messages]
    assert texts[0] == "Error: RuntimeError: broken pipe"
    assert texts[1].startswith("Error: unknown tool `nobody`")
    assert texts[2].startswith("Error: argument `who` is missing")
    assert texts[3].startswith("Error: the arguments are not valid JSON")
    assert step.messages[4]["role"] == "user"
    assert texts[4] == (
        "Error: the tool call could not be read: no name\nError: the tool call could not be read: cut off"
    )
    counts = {key: value for key, value in step.info.items() if key != "tool_seconds"}
    assert counts == {
        "tool_calls": 6,
        "tool_broken": 2,
        "tool_raised": 1,
        "tool_unknown_tool": 1,
        "tool_bad_arguments": 2,
    }


async def test_a_broken_call_alone_is_answered() -> None:
    step = await Meeting().step(turn(broken=("no name",)))
    assert not step.done
    assert [message["role"] for message in step.messages] == ["user"]


@pytest.mark.parametrize("written", [turn(call("meet")), turn(broken=("no name",))], ids=["call", "broken"])
async def test_without_tools_the_first_turn_is_the_answer(written: Turn) -> None:
    assert await Environment().step(written) == Step(done=True)


async def test_methods_and_functions_of_base_classes_are_tools() -> None:
    def plain(x: int) -> int:
        """Plain."""
        return x

    class Child(Meeting):
        tools = (plain,)

        @tool
        def who_am_i(self) -> str:
            """Who."""
            return type(self).__name__

        @tool
        def fail(self) -> str:
            """Fail otherwise."""
            return "fine"

    env = Child()
    names = [schema["function"]["name"] for schema in env.toolbox.schemas]
    assert names == ["plain", "meet", "fail", "who_am_i"]
    step = await env.step(turn(call("who_am_i"), call("plain", {"x": 3}), call("fail")))
    assert [message["content"] for message in step.messages] == ["Child", "3", "fine"]
    assert await env.who_am_i.call({}) == "Child"


async def test_a_static_method_is_a_tool() -> None:
    class Doubling(Environment):
        @staticmethod
        @tool
        def double(x: int) -> int:
            """Double."""
            return 2 * x

    (step,) = (await Doubling().step(turn(call("double", {"x": 3})))).messages
    assert step["content"] == "6"


def test_tools_of_an_instance_are_refused() -> None:
    class Own(Environment):
        def __init__(self) -> None:
            self.tools = [call]  # type: ignore[misc]

    with pytest.raises(PluginError, match="Own: set `tools` on the class, not an instance"):
        _ = Own().toolbox


async def test_an_undecorated_method_in_tools_is_bound_too() -> None:
    class Counting(Environment):
        count = 0

        async def up(self, by: int) -> int:
            """Count."""
            self.count += by
            return self.count

        tools = (up,)

    env, other = Counting(), Counting()
    await env.step(turn(call("up", {"by": 2})))
    assert (env.count, other.count) == (2, 0)


async def test_cancelling_a_step_cancels_its_tools() -> None:
    env = Meeting()
    with anyio.move_on_after(0.02) as scope:
        await env.step(turn(call("meet", {"who": "first"})))
    assert scope.cancelled_caught


async def test_default_reward_is_the_named_grader() -> None:
    sample = Sample(prompt="Capital of France?", response="Paris", label="Paris")
    assert await Environment.create(SimpleNamespace(rm_type="exact_match")).reward(sample) == 1.0
    sample.response = "Rome"
    assert await Environment.create(SimpleNamespace(rm_type="exact_match")).reward(sample) == 0.0
    with pytest.raises(AgentRLError, match="rm-type"):
        await Environment.create(SimpleNamespace(rm_type="no_such_grader")).reward(sample)


async def test_setup_teardown_and_close_do_nothing_by_default() -> None:
    await Environment.setup(None)
    await Environment().close()
    await Environment.teardown()


# ---- rewards of steps ---------------------------------------------------------------------------------------------------


class Paid(Environment):
    async def step(self, turn: Turn) -> Step:
        return Step(done=True, reward=1.0)


def finished(status: Status = Status.COMPLETED, **metadata: Any) -> Sample:
    return Sample(prompt="Capital of France?", response="Paris", label="Paris", status=status, metadata=metadata)


async def test_rewards_of_steps_are_the_trajectorys() -> None:
    assert await Paid().reward(finished(step_rewards=[0.5, None, -2.0])) == -1.5
    assert await Paid().reward(finished(step_rewards=[0.0])) == 0.0
    graded = Paid.create(SimpleNamespace(rm_type="exact_match"))
    assert await graded.reward(finished(step_rewards=[0.5, None])) == 1.5
    assert await Paid().reward(finished(step_rewards=[0.5], rm_type="exact_match")) == 1.5


@pytest.mark.parametrize(("key", "expected"), [("score", (1.25, 0.0)), ("format", (1.0, 0.25))])
async def test_of_a_dict_they_count_in_the_entry_that_trains(
    key: str, expected: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def graded(args: Any, sample: Sample) -> dict[str, float]:
        return {"score": 1.0, "format": 0.0}

    monkeypatch.setattr("agentrl.rm_hub.async_rm", graded)
    env = Paid.create(SimpleNamespace(rm_type="exact_match", reward_key=key))
    got = await env.reward(finished(step_rewards=[0.25]))
    assert got == dict(zip(("score", "format"), expected, strict=True))


async def test_a_trajectory_that_nothing_gave_a_reward() -> None:
    with pytest.raises(SettingsError, match=r"Paid.step never returned Step\(reward=.*Paid has no reward.*--rm-type"):
        await Paid().reward(finished(step_rewards=[None, None]))
    assert await Paid().reward(finished(Status.TRUNCATED, step_rewards=[None])) == 0.0
    with pytest.raises(SettingsError, match="Environment.step never returned"):
        await Environment().reward(finished(Status.TRUNCATED))
