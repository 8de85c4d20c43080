"""`verifiers:ID` with the pinned library: rewards equal the library's for a transcript, ids and masks are exact."""

import asyncio
import json
import os
import random
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from agentrl import Sample
from agentrl.envs import AgentEnvironment, load_environment
from agentrl.errors import EnvFailure, PluginError
from tests.gateway.acceptance_engine import hermes
from tests.gateway.live import Live, live

TASKSETS = Path(__file__).parent / "tasksets"
ADD = "adder_add"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tasksets importable, here and in the processes of their tools."""
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(str(TASKSETS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TASKSETS), *filter(None, sys.path)]))


@asynccontextmanager
async def opened(name: str = "counting-v1", max_turns: int | None = None, **arguments: Any) -> AsyncIterator[Any]:
    """Make a separate environment class and set it up."""
    kind: Any = type("Fresh", (load_environment(f"verifiers:{name}"),), {})
    await kind.setup(SimpleNamespace(env_args=arguments, max_turns=max_turns))
    try:
        yield kind
    finally:
        await kind.teardown()


class Plan:
    """The turns of the episode that is being played; the last turn repeats."""

    def __init__(self) -> None:
        self.turns = ["done"]

    def __call__(self, turn: int, prompt: str) -> str:
        said = prompt.rpartition("<|im_start|>user\nAdd up")[2].count("<|im_start|>assistant") - 1
        return self.turns[min(said, len(self.turns) - 1)]


async def play(served: Live, kind: type[AgentEnvironment], number: int) -> tuple[Sample, float]:
    """Play one episode; the gateway's audit then compares each id, log-prob and mask with the engine's log."""
    served.engine.log.clear()
    session, env, sample = served.open(), kind(), Sample(group_index=number, index=number)
    try:
        await env.act(served.gateway.url(session), sample)
        reward = await env.reward(sample)
    finally:
        await env.close()
        played = served.close(session)
    (only,) = played.samples
    assert played.roots == 1
    assert played.counts["trained"] == played.counts["sampled"]
    only.metadata.update(sample.metadata)
    assert isinstance(reward, float)
    return only, reward


async def theirs(kind: Any, number: int, messages: list[dict[str, Any]], state: Any) -> Any:
    """Return the library's score of a transcript, from its task alone."""
    import verifiers.v1 as vf
    from verifiers.v1.dialects.chat import ChatDialect

    task = await kind.tasks.at(number)
    wire = deepcopy(messages)
    for call in (call for each in wire for call in each.get("tool_calls") or ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    parsed = ChatDialect().parse_request({"model": "any", "messages": wire}).messages
    start = len(parsed) - sum(1 for _ in _after_prompt(messages))
    nodes = [
        vf.MessageNode(parent=at - 1 if at else None, message=each, sampled=at >= start and each.role == "assistant")
        for at, each in enumerate(parsed)
    ]
    trace = vf.Trace(
        task=vf.TraceTask(type="any", data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
        state=state,
    )
    await task.score(trace)
    return trace


def _after_prompt(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    asked = max(at for at, each in enumerate(messages) if str(each["content"]).startswith("Add up"))
    return messages[asked + 1 :]


def plan(rng: random.Random, goal: int) -> tuple[list[str], list[list[int]]]:
    """Draw a model's turns, and the numbers that their calls add: well made, denied, broken or unknown."""
    turns, added = [], []
    for _ in range(rng.randint(0, 5)):
        numbers = [rng.randint(1, max(1, goal // 2)) for _ in range(rng.choice([1, 1, 1, 2]))]
        kind = rng.choice(["", "", "", "", "forbidden", "text", "unknown"])
        name = "subtract" if kind == "unknown" else ADD
        calls: list[tuple[str, Any]] = [(name, {"number": "many" if kind == "text" else each}) for each in numbers]
        turns.append(hermes(None, "this is forbidden" if kind == "forbidden" else "", calls))
        added.append([] if kind else numbers)
    said = rng.choice([f"<{goal}>", "I do not know", f"reached <{goal}>"])
    return [*turns, said], added


@pytest.mark.slow
async def test_200_episodes_earn_the_rewards_of_the_library_for_the_same_transcript() -> None:
    rng, following, seen, stops = random.Random(5), Plan(), set[float](), set[str]()
    async with opened() as kind, live(following) as served:
        from counting_v1 import MAX_CALLS, Count

        for number in range(200):
            goal = number % 20 + 1
            following.turns, added = plan(rng, goal)
            sample, reward = await play(served, kind, number)
            state = Count()
            for numbers in added:
                if state.calls < MAX_CALLS:
                    state.total, state.calls = state.total + sum(numbers), state.calls + len(numbers)
            trace = await theirs(kind, number, sample.metadata["messages"], state)
            told = sample.metadata["verifiers"]
            assert reward == trace.reward
            assert told["rewards"] == {name: each.value for name, each in trace.rewards.items()}
            assert told["metrics"] == trace.metrics
            assert told["task"] == number % 20
            seen.add(reward)
            stops.add(told["stop"])
    assert seen == {0.0, 0.25, 1.0, 1.25}
    assert stops == {"agent_completed", "enough"}


@pytest.mark.slow
async def test_the_chat_loop_plays_as_the_program_of_the_librarys_null(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program runs in a separate process, with this Python instead of the one that `uv` makes."""
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    async def prepare(self: Any, script: str, env: Any = None, *, activate: bool = True) -> list[str]:
        await self.write("null.py", script.encode())
        return [sys.executable, str(self.workdir / "null.py")]

    monkeypatch.setattr(SubprocessRuntime, "prepare_uv_script", prepare)
    following, rng, transcripts = Plan(), random.Random(2), dict[str, list[Any]]()
    plans = [plan(rng, number + 1)[0] for number in range(4)]
    for harness in ("null", "agentrl-chat"):
        async with opened(agent={"harness": {"id": harness}}) as kind, live(following) as served:
            for number, following.turns in enumerate(plans):
                sample, reward = await play(served, kind, number)
                transcripts.setdefault(harness, []).append((sample.metadata["messages"], reward))
    assert transcripts["null"] == transcripts["agentrl-chat"]
    assert any(message["role"] == "tool" for messages, _ in transcripts["null"] for message in messages)


@pytest.mark.slow
async def test_an_episode_that_fails_or_is_cancelled_leaves_nothing() -> None:
    from counting_v1 import BROKEN

    following = Plan()
    async with opened(max_turns=2) as kind, live(following) as served:
        following.turns = [hermes(None, "", [(ADD, {"number": BROKEN})]), "done"]
        with pytest.raises(EnvFailure, match="TaskError: .*no reward for this sum") as failed:
            await play(served, kind, 0)
        assert failed.value.kind == "verifiers_failed"

        following.turns = [hermes(None, "", [(ADD, {"number": 1})])]
        sample, _ = await play(served, kind, 0)
        assert sample.metadata["verifiers"] == {
            "task": 0,
            "rewards": {"reached": 0.0, "named": 0.0},
            "metrics": {"calls": 2.0},
            "stop": "max_turns",
        }

        served.engine.gate = asyncio.Event()
        served.engine.asking.clear()
        for number in range(4):
            session, env = served.open(), kind()
            async with anyio.create_task_group() as group:
                group.start_soon(env.act, served.gateway.url(session), Sample(group_index=number))
                await served.engine.asking.wait()
                group.cancel_scope.cancel()
            served.gateway.close(session.token)
            await env.close()
            served.engine.asking.clear()
        assert not kind.env._interception.sessions
        assert not kind.env._interception.clients
        assert not {task for task in asyncio.all_tasks() if "run_episode" in repr(task)}


@pytest.mark.slow
async def test_another_agent_of_the_environment_has_a_model_of_its_own() -> None:
    """The user of `user-sim` asks another gateway. Only the turns of the assistant train."""
    following = Plan()
    async with (
        live(lambda turn, prompt: ["What is it?", "###DONE###"][min(turn, 1)]) as others,
        live(following) as served,
    ):
        user = {
            "model": "user",
            "client": {"type": "eval", "base_url": others.gateway.url(others.open()) + "/v1"},
            "harness": {"id": "agentrl-chat"},
        }
        async with opened(id="user-sim", user=user) as kind:
            following.turns = ["the sum is <1>"]
            sample, reward = await play(served, kind, 0)
    assert reward == 0.25
    said = [(each["role"], each["content"]) for each in sample.metadata["messages"]]
    assert said[-2:] == [("user", "What is it?"), ("assistant", "the sum is <1>")]


async def test_settings_that_cannot_be_played_are_refused() -> None:
    for arguments, message in (
        ({"taskset": {"goals": 3}}, "verifiers:counting-v1: --env-args: taskset.goals: Extra inputs are not permitted"),
        ({"select": {"limit": -1}}, "--env-args: limit: Input should be greater than or equal to 1"),
        ({"select": {"skip": 50}}, "the taskset has no tasks, or --env-args select=... selects none"),
        ({"agent": {"retries": {"max_retries": 2}}}, "leave out interception and retries"),
        ({"interception": {"type": "elastic"}}, "leave out interception and retries"),
        ({"agent": {"harness": {"id": "bash"}}}, "the harness bash runs commands of the model; choose a runtime: "),
        ({"id": "user-sim"}, "the model plays one of assistant, user; give all others a client"),
    ):
        with pytest.raises(PluginError, match=re.escape(message)):
            async with opened(**arguments):
                pass
    with pytest.raises(PluginError, match="taskset 'nothing-v1' not found.*No module named 'nothing_v1'"):
        load_environment("verifiers:nothing-v1")


async def test_tasks_are_numbered_as_the_selection_has_them() -> None:
    async with opened(select={"include": {"idx": "3:6"}}) as kind:
        assert [(await kind.tasks.at(number)).data.goal for number in (0, 1, 2, 3, 200)] == [4, 5, 6, 4, 6]
