"""User code that raises, hangs or returns a wrong value: the message names the code and the remedy."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import pytest

from agentrl import Environment, Sample, Step, tool
from agentrl.chat import Chat
from agentrl.envs import Turn
from agentrl.errors import (
    AgentRLError,
    Blame,
    EnvFailure,
    GraderFailure,
    PluginError,
    SandboxUnavailable,
    TrajectoryTimeout,
)
from agentrl.rollout.failures import guarded
from agentrl.rollout.functions import GenerateFunction
from agentrl.rollout.settings import FailureAction
from agentrl.rollout.user_tasks import UserTasks
from agentrl.sample import Message
from agentrl.sandbox import Sandbox
from tests.rollout.scripted import END, EchoEnv, Store, build
from tests.support.virtual_time import virtual_time

UserFunction = Callable[..., Awaitable[object]]


class Own(BaseException):
    """A user's exception that is no `Exception`."""


def deeper(*_: Any) -> None:
    deeper()


RAISED: dict[str, Callable[[], Any]] = {
    "SystemExit": lambda: sys.exit(3),
    "KeyboardInterrupt": lambda: raised(KeyboardInterrupt()),
    "GeneratorExit": lambda: raised(GeneratorExit()),
    "Own": lambda: raised(Own("mine")),
    "CancelledError": lambda: raised(asyncio.CancelledError()),
    "RecursionError": deeper,
}
CALL = f'<tool_call>\n{{"name": "look", "arguments": {{}}}}\n</tool_call>{END}'


def raised(error: BaseException) -> None:
    raise error


def spoiled(hook: str, fail: Callable[[], Any]) -> dict[str, Any]:
    """Return the arguments of `build` for a run whose `hook` calls `fail`."""

    async def late(*_: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        fail()

    if hook in ("__init__", "reset", "step", "reward", "close"):
        method = (lambda self: fail()) if hook == "__init__" else late
        return {"environment": type("Spoiled", (EchoEnv,), {hook: method})}
    if hook == "generate":
        return {"generate": late_generate(late), "environment": None}
    if hook == "custom rm":
        return {"reward": late_reward(late)}
    return (
        {"reward": lambda args, sample: fail()}
        if hook == "custom rm in a thread"
        else {"group_filter": lambda a, b: fail()}
    )


def late_generate(fail: UserFunction) -> UserFunction:
    async def generate(args: Any, sample: Sample, sampling_params: object) -> None:
        await fail()

    return generate


def late_reward(fail: UserFunction) -> UserFunction:
    async def reward(args: Any, sample: Sample) -> float:
        await fail()
        return 0.0

    return reward


@pytest.mark.parametrize("name", RAISED)
@pytest.mark.parametrize(
    "hook",
    ["__init__", "reset", "step", "reward", "close", "generate", "custom rm", "custom rm in a thread", "filter"],
)
async def test_no_exception_of_user_code_ends_a_run_without_a_word(chat: Chat, hook: str, name: str) -> None:
    policy = dict.fromkeys((Blame.ENV, Blame.GRADER), FailureAction.RAISE)
    loop, _ = build(chat, [f"hello{END}"], failure_policy=policy, **spoiled(hook, RAISED[name]))
    with anyio.fail_after(60), pytest.raises(AgentRLError, match=rf"{name}.* at .*test_user_faults\.py:\d+"):
        await loop.run(0)


@pytest.mark.parametrize("name", RAISED)
@pytest.mark.parametrize("threaded", [False, True])
async def test_no_exception_of_a_tool_ends_a_run(chat: Chat, threaded: bool, name: str) -> None:
    fail = RAISED[name]

    async def look() -> str:
        """Look."""
        await anyio.lowlevel.checkpoint()
        fail()
        return "never"

    def look_in_a_thread() -> str:
        """Look."""
        fail()
        return "never"

    made = tool(name="look")(look_in_a_thread if threaded else look)
    loop, _ = build(chat, [CALL, f"done{END}"], environment=type("Spoiled", (EchoEnv,), {"tools": [made]}))
    with anyio.fail_after(60):
        result = await loop.run(0)
    assert all(f"Error: {name}" in sample.response for group in result.groups for sample in group)


class RaisingInit(EchoEnv):
    def __init__(self) -> None:
        raise OSError("no such index")


class RaisingReset(EchoEnv):
    async def reset(self, sample: Sample) -> list[Message]:
        return [{"role": "user", "content": sample.metadata["question"]}]


class HangingReset(EchoEnv):
    async def reset(self, sample: Sample) -> list[Message]:
        await anyio.sleep_forever()
        raise AssertionError


class TextMessages(EchoEnv):
    async def step(self, turn: Turn) -> Step:
        return Step(["a text"])  # type: ignore[list-item]


class OneMessage(EchoEnv):
    async def step(self, turn: Turn) -> Step:
        return Step({"role": "user", "content": "not in a list"})  # type: ignore[arg-type]


class ListInfo(EchoEnv):
    async def step(self, turn: Turn) -> Step:
        return Step(done=True, info=[1])  # type: ignore[arg-type]


class NoRole(EchoEnv):
    async def reset(self, sample: Sample) -> list[Message]:
        return [{"content": "who says it?"}]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (RaisingInit, r"making a RaisingInit raised OSError: no such index at .*test_user_faults.py:\d+"),
        (RaisingReset, r"RaisingReset.reset raised KeyError: 'question' at .*test_user_faults.py:\d+"),
        (HangingReset, r"HangingReset.reset took longer than 0.1 s; --env-timeout sets the limit"),
        (TextMessages, r"TextMessages.step must return a list of messages .*got \['a text'\]"),
        (OneMessage, "OneMessage.step must return a list of messages"),
        (ListInfo, r"ListInfo.step: Step.info must be a mapping of numbers, got \[1\]"),
        (NoRole, "NoRole.reset must return a list of messages"),
    ],
)
@virtual_time
async def test_an_environment(chat: Chat, environment: type[Environment], message: str) -> None:
    store = Store()
    loop, _ = build(chat, [f"hello{END}"], environment=environment, env_timeout=0.1, store=store)
    with pytest.raises(EnvFailure, match=message):
        await loop.run(0)
    assert set(store.fate.values()) == {"released"}


async def raising(args: Any, sample: Sample, sampling_params: object) -> None:
    raise ValueError("cannot reach the sandbox")


async def raising_group(args: Any, samples: list[Sample]) -> None:
    raise ValueError("cannot reach the sandbox")


async def hanging(args: Any, sample: Sample, sampling_params: object) -> None:
    await anyio.sleep_forever()


async def hanging_group(args: Any, samples: list[Sample]) -> None:
    await anyio.sleep_forever()


@pytest.mark.parametrize("generate", [raising, raising_group])
async def test_a_generate_function_that_raises(chat: Chat, generate: UserFunction) -> None:
    loop, _ = build(chat, [], generate=generate, environment=None)
    with pytest.raises(EnvFailure, match=r"my generate raised ValueError: cannot reach the sandbox at .*\.py:\d+"):
        await loop.run(0)


@pytest.mark.parametrize("generate", [hanging, hanging_group])
@virtual_time
async def test_a_generate_function_that_hangs_is_a_timeout(chat: Chat, generate: UserFunction) -> None:
    policy = {Blame.TIMEOUT: FailureAction.RAISE}
    loop, _ = build(chat, [], generate=generate, environment=None, trajectory_timeout=0.1, failure_policy=policy)
    with pytest.raises(TrajectoryTimeout, match=r"took longer than 0\.[12] s; --trajectory-timeout sets the limit"):
        await loop.run(0)


async def raising_reward(args: Any, sample: Sample) -> float:
    score: float = sample.metadata["score"]
    return score


async def hanging_reward(args: Any, sample: Sample) -> None:
    await anyio.sleep_forever()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (raising_reward, r"my reward raised KeyError: 'score' at .*test_user_faults.py:\d+"),
        (hanging_reward, "my reward took longer than 0.1 s; --reward-timeout sets the limit"),
    ],
)
@virtual_time
async def test_a_reward_function(chat: Chat, reward: UserFunction, message: str) -> None:
    policy = {Blame.GRADER: FailureAction.RAISE}
    loop, _ = build(chat, [f"hello{END}"], reward=reward, reward_timeout=0.1, failure_policy=policy)
    with pytest.raises(GraderFailure, match=message):
        await loop.run(0)


@pytest.mark.parametrize(("answer", "got"), [([1.0], "1"), (1.0, "float 1.0")])
async def test_the_wrong_number_of_rewards_ends_the_run_at_once(
    chat: Chat, answer: float | list[float], got: str
) -> None:
    async def reward(args: Any, samples: list[Sample]) -> float | list[float]:
        return answer

    loop, _ = build(chat, [f"hello{END}"], reward=reward, group_rm=True)
    with pytest.raises(AgentRLError, match=f"my reward returned {got} rewards for 2 samples; return a list"):
        await loop.run(0)


async def test_a_reward_function_that_fails_now_and_then_drops_the_group(chat: Chat) -> None:
    async def reward(args: Any, sample: Sample) -> float:
        return 1.0 / (sample.group_index != 1)

    store = Store()
    loop, _ = build(chat, [f"hello{END}"], reward=reward, store=store)
    result = await loop.run(0)
    assert store.fate[1] == "dropped:grader/grader_raised"
    assert len(result.groups) == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda samples: samples[9], r"the group filter choose .* raised IndexError: .* at .*test_user_faults.py:\d+"),
        (lambda samples: "yes", "must return a bool or an object with a bool `keep`, got 'yes'"),
    ],
)
async def test_a_group_filter(chat: Chat, answer: Callable[[list[Sample]], object], message: str) -> None:
    def choose(args: Any, samples: list[Sample]) -> object:
        return answer(samples)

    loop, _ = build(chat, [f"hello{END}"], group_filter=choose)
    with pytest.raises(PluginError, match=message):
        await loop.run(0)


async def test_one_sample_object_for_two_trajectories_is_refused(chat: Chat) -> None:
    async def whole(args: Any, samples: list[Sample]) -> list[Sample]:
        samples[0].set_prompt_tokens([1])
        samples[0].append_model([2], [-1.0], "0")
        return [samples[0]] * len(samples)

    async def each(args: Any, sample: Sample, params: object) -> list[Sample]:
        return await whole(args, [sample, sample])

    for generate in (whole, each):
        loop, _ = build(chat, [], generate=generate, environment=None)
        with pytest.raises(EnvFailure, match="returned the same Sample object more than once"):
            await loop.run(0)


def test_options_with_defaults_do_not_change_the_form() -> None:
    async def group(args: Any, samples: list[Sample], width: int = 3) -> None: ...

    async def group_eval(args: Any, samples: list[Sample], width: int = 3, evaluation: bool = False) -> None: ...

    async def each(
        args: Any, sample: Sample, sampling_params: object, evaluation: bool = False, width: int = 3
    ) -> None: ...

    async def each_optional(args: Any, sample: Sample, sampling_params: object = None) -> None: ...

    forms = [GenerateFunction.of(f, "generate").per_sample for f in (group, group_eval, each, each_optional)]
    assert forms == [False, False, True, True]


async def test_an_environment_that_cannot_be_made_for_an_own_loop_follows_the_policy(chat: Chat) -> None:
    async def whole(args: Any, samples: list[Sample]) -> None: ...

    async def each(args: Any, sample: Sample, params: object) -> None: ...

    for generate in (whole, each):
        loop, _ = build(chat, [], generate=generate, environment=RaisingInit)
        with pytest.raises(EnvFailure, match="making a RaisingInit raised OSError: no such index"):
            await loop.run(0)
        policy = {Blame.ENV: FailureAction.DROP_GROUP}
        loop, _ = build(chat, [], generate=generate, environment=RaisingInit, failure_policy=policy)
        with pytest.raises(AgentRLError, match=r"5\d groups in a row were dropped.*env/env_raised"):
            await loop.run(0)


class Leaving(EchoEnv):
    """Starts a task in each step that continues after the trajectory has ended."""

    tasks: ClassVar[list[asyncio.Task[None]]] = []

    async def step(self, turn: Turn) -> Step:
        self.tasks.append(asyncio.create_task(anyio.sleep_forever()))
        return Step(done=True)


async def test_tasks_that_outlive_their_trajectory_are_cancelled_counted_and_named_once(
    chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    loop, _ = build(chat, [f"hello{END}"], environment=Leaving)
    Leaving.tasks.clear()
    with UserTasks.followed() as tasks:
        await loop.run(0)
        await anyio.wait_all_tasks_blocked()
        assert len(Leaving.tasks) >= 6
        assert all(task.cancelled() for task in Leaving.tasks)
        assert tasks.take() == {"left_tasks/Leaving.step": float(len(Leaving.tasks))}
        assert tasks.take() == {}
    line = Leaving.step.__code__.co_firstlineno + 1
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"Leaving.step leaves a task running that it started at {__file__}:{line}" in said


async def test_tasks_that_end_or_are_cancelled_in_time_are_not_counted(chat: Chat) -> None:
    class Tidy(EchoEnv):
        async def step(self, turn: Turn) -> Step:
            asyncio.create_task(anyio.sleep_forever()).cancel()
            await asyncio.gather(anyio.lowlevel.checkpoint(), anyio.lowlevel.checkpoint())
            return Step(done=True)

    loop, _ = build(chat, [f"hello{END}"], environment=Tidy)
    with UserTasks.followed() as tasks:
        await loop.run(0)
        assert tasks.take() == {}


async def test_a_task_of_setup_belongs_to_the_run(chat: Chat) -> None:
    async def setup() -> asyncio.Task[None]:
        return asyncio.create_task(anyio.sleep_forever())

    with UserTasks.followed() as tasks:
        task = await guarded(setup(), what="Env.setup", timeout=60, failure=EnvFailure)
        await anyio.wait_all_tasks_blocked()
        assert not task.done()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tasks.take() == {}


@pytest.mark.parametrize("name", ["SystemExit", "KeyboardInterrupt", "Own"])
@pytest.mark.parametrize("awaited", ["awaited", "beside the step", "after the step"])
async def test_a_task_that_raises_ends_its_trajectory(chat: Chat, awaited: str, name: str) -> None:
    async def background() -> None:
        await anyio.lowlevel.checkpoint()
        RAISED[name]()

    class Starting(EchoEnv):
        async def step(self, turn: Turn) -> Step:
            self.task = asyncio.create_task(background())
            if awaited == "after the step":
                return Step(done=True)
            await (self.task if awaited == "awaited" else anyio.sleep_forever())
            raise AssertionError

        async def reward(self, sample: Sample) -> float:
            await anyio.sleep_forever()
            raise AssertionError

    policy = dict.fromkeys((Blame.ENV, Blame.GRADER), FailureAction.RAISE)
    loop, _ = build(chat, [f"hello{END}"], environment=Starting, failure_policy=policy)
    whose = "the trajectory" if awaited == "after the step" else r"Starting\.step"
    said = rf"sample \d.*{whose} raised {name}.* at .*test_user_faults\.py:\d+"
    with anyio.fail_after(60), UserTasks.followed(), pytest.raises(EnvFailure, match=said):
        await loop.run(0)


async def test_a_task_of_a_tool_that_raises_is_an_observation(chat: Chat) -> None:
    @tool
    async def look() -> str:
        """Look."""
        async with anyio.create_task_group() as group:
            group.start_soon(late_exit)
        return "never"

    async def late_exit() -> None:
        await anyio.lowlevel.checkpoint()
        sys.exit(3)

    loop, _ = build(chat, [CALL, f"done{END}"], environment=type("Tasking", (EchoEnv,), {"tools": [look]}))
    with anyio.fail_after(60), UserTasks.followed():
        result = await loop.run(0)
    assert all("Error: SystemExit: 3" in sample.response for group in result.groups for sample in group)


async def test_a_tool_without_a_sandbox_stops_the_run(chat: Chat) -> None:
    """No model can learn from a machine without a sandbox."""

    class Boxed(Environment):
        @tool
        async def look(self) -> str:
            """Look."""
            result = await Sandbox(preload=()).run("1")
            return result.stdout

    loop, _ = build(chat, [CALL], environment=Boxed, failure_policy=dict.fromkeys(Blame, FailureAction.DROP_GROUP))
    with pytest.raises(SandboxUnavailable, match=r"group 0, sample \d, turn 1: the sandbox is not open"):
        await loop.run(0)
