"""A gateway that ends, or whose engines fail, during an agent's session: typed failures, and no lost group."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from agentrl.buffer.ledger import Ledger, State
from agentrl.buffer.queue import GroupQueue
from agentrl.chat import Chat
from agentrl.envs import command_environment
from agentrl.errors import AgentFailure, AgentRLError, Blame, ContextOverflow, EngineUnreachable, Failure
from agentrl.gateway.record import SessionRecord
from agentrl.gateway.server import Gateway
from agentrl.rollout.settings import FailureAction
from agentrl.sample import Sample, Status
from tests.buffer.make import make_args, prompts, source_of
from tests.rollout.scripted import END, build
from tests.rollout.test_agents import PROGRAM, ask, played, two_turns
from tests.support.tiny_models import make_tiny_model

SETTINGS: dict[str, Any] = {"rollout_batch_size": 1, "n_samples_per_prompt": 2}
AWAY = EngineUnreachable("no engine answers")


def queue_of(ledger: Ledger, folder: Path, n: int = 2) -> GroupQueue:
    return GroupQueue(source_of(make_args(prompts(folder / "p.jsonl", 1), n_samples_per_prompt=n)), ledger, None)


class NotingGateway(Gateway):
    """A gateway that records its first closed session."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.one_closed = anyio.Event()

    def close(self, token: str, rewards: Mapping[int, float] | float | None = None) -> list[Sample]:
        samples = super().close(token, rewards)
        self.one_closed.set()
        return samples


async def closed_in_the_middle(chat: Chat, ledger: Ledger, folder: Path, action: FailureAction) -> list[Sample]:
    """Play a group of three. Its gateway is closed when the first has ended and the others are in their first turn."""
    ended, over, asked = AsyncExitStack(), anyio.Event(), list[int]()

    async def agent(base_url: str, sample: Sample) -> float:
        history = [{"role": "user", "content": str(sample.prompt)}]
        history += [await ask(base_url, history), {"role": "user", "content": "go on"}]
        asked.append(sample.index or 0)
        if sample.index == 0:
            return 1.0
        if len(asked) == 3:
            await gateway.one_closed.wait()
            await ended.aclose()
            over.set()
        await over.wait()
        await ask(base_url, history)
        return 1.0

    settings = {**SETTINGS, "n_samples_per_prompt": 3, "failure_policy": {"engine": action, "env": "raise"}}
    batch, _ = build(chat, [f"said{END}"], environment=None, generate=agent, **settings)
    context = batch.player.context
    gateway = NotingGateway(chat, context.client, context_length=context.context_length)
    await ended.enter_async_context(gateway.serving())
    batch.player.context = replace(context, gateway=gateway)
    async with ended, batch.running(queue_of(ledger, folder, 3)) as coordinator:
        return [sample for group in (await coordinator.batch(0)).groups for sample in group]


@pytest.mark.parametrize(
    ("action", "state", "reason"),
    [
        (FailureAction.RAISE, State.WAITING, "interrupted"),
        (FailureAction.DROP_GROUP, State.DROPPED, "engine/gateway_closed"),
        (FailureAction.KEEP_MASKED, State.COMPLETED, None),
    ],
)
async def test_a_gateway_that_is_closed_in_a_session_is_a_failure_of_the_engine_and_no_group_is_lost(
    chat: Chat, tmp_path: Path, action: FailureAction, state: State, reason: str | None
) -> None:
    samples: list[Sample] = []
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        if action is FailureAction.KEEP_MASKED:
            samples = await closed_in_the_middle(chat, ledger, tmp_path, action)
        else:
            kind = EngineUnreachable if action is FailureAction.RAISE else AgentRLError
            with pytest.raises(kind, match="the gateway is closed"):
                await closed_in_the_middle(chat, ledger, tmp_path, action)
        assert {each for each, count in ledger.counts().items() if count} == {state}
        with ledger.transaction() as db:
            last = db.execute("SELECT reason FROM events WHERE group_id=0 ORDER BY seq DESC LIMIT 1").fetchone()
        assert last[0] == reason
    assert len(samples) == (3 if action is FailureAction.KEEP_MASKED else 0)
    for sample in samples[:1]:
        assert (sample.status, sample.reward) == (Status.COMPLETED, 1.0)
    for sample in samples[1:]:
        assert (sample.status, sample.reward, sample.trained_tokens) == (Status.FAILED, 0.0, 0)
        failure = sample.metadata["failure"]
        assert (failure["blame"], failure["kind"]) == (Blame.ENGINE, "gateway_closed")
        record = SessionRecord.model_validate(sample.metadata["gateway"]["session"])
        assert [(turn.reason, turn.dropped) for turn in record.turns] == [("first", "unrewarded")]


RUN = """
import asyncio, sys
from pathlib import Path
from agentrl.buffer.ledger import Ledger
from agentrl.chat import Chat
from tests.rollout.scripted import END, build
from tests.rollout.test_agents import ask, with_gateway
from tests.rollout.test_agents_gateway_ends import SETTINGS, queue_of

folder = Path(sys.argv[1])

async def agent(base_url, sample):
    await ask(base_url, [{"role": "user", "content": str(sample.prompt)}])
    print("asked", flush=True)
    await asyncio.sleep(600)

async def main():
    batch, _ = build(Chat.load(str(folder)), [f"said{END}"], environment=None, generate=agent, **SETTINGS)
    async with with_gateway(batch):
        with Ledger(folder / "ledger.sqlite") as ledger:
            async with batch.running(queue_of(ledger, folder)) as coordinator:
                await coordinator.batch(0)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_group_whose_gateway_is_killed_in_a_session_is_leased_again(tmp_path: Path) -> None:
    make_tiny_model(folder := tmp_path)
    with subprocess.Popen([sys.executable, "-c", RUN, str(folder)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "asked\n"
        child.send_signal(signal.SIGKILL)
    with Ledger(folder / "ledger.sqlite") as ledger:
        assert ledger.counts()[State.LEASED] == 1
        queue = queue_of(ledger, folder)
        assert ledger.counts()[State.WAITING] == 1
        (group,) = queue.lease(1, 0)
        assert [sample.prompt for sample in group] == ["question 0"] * 2


@pytest.mark.parametrize("form", ["function", "command"])
async def test_an_agent_that_gives_up_because_of_the_engines_is_no_finished_trajectory(chat: Chat, form: str) -> None:
    settings = {**SETTINGS, "failure_policy": {"engine": "raise", "env": "drop_group", "agent": "drop_group"}}
    if form == "function":
        batch, _ = build(chat, [f"said{END}", AWAY], environment=None, generate=two_turns, **settings)
    else:
        kind = command_environment(f"{sys.executable} -c {shlex.quote(PROGRAM)} {{prompt}}", "none", ())
        batch, _ = build(chat, [f"said{END}", AWAY], environment=kind, **settings)
    with pytest.raises(EngineUnreachable, match="no engine answers"):
        await played(batch)


async def test_an_agent_that_asks_again_after_a_failure_goes_on(chat: Chat) -> None:
    async def agent(base_url: str, sample: Sample) -> float:
        history = [{"role": "user", "content": str(sample.prompt)}]
        history += [await ask(base_url, history), {"role": "user", "content": "go on"}]
        with pytest.raises(httpx.HTTPStatusError, match="503"):
            await ask(base_url, history)
        await ask(base_url, history)
        return 1.0

    batch, _ = build(chat, [f"a{END}", AWAY, f"b{END}"], environment=None, generate=agent, **SETTINGS)
    for sample in await played(batch):
        assert sample.metadata["gateway"]["reasons"] == ["first", "extend"]
        assert sample.trained_tokens == len(chat.encode(f"a{END}")) + len(chat.encode(f"b{END}"))
        assert sample.status is Status.COMPLETED


async def test_an_agent_that_ends_at_a_full_context_leaves_a_truncated_trajectory(chat: Chat) -> None:
    async def agent(base_url: str, sample: Sample) -> float:
        history = [{"role": "user", "content": str(sample.prompt)}]
        history += [await ask(base_url, history), {"role": "user", "content": "more " * 4000}]
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            await ask(base_url, history)
        return 0.25

    batch, _ = build(chat, [f"said{END}"], environment=None, generate=agent, **SETTINGS)
    for sample in await played(batch):
        assert (sample.stop_reason, sample.status, sample.reward) == ("context", Status.TRUNCATED, 0.25)
        assert sample.trained_tokens == len(chat.encode(f"said{END}"))


async def test_a_first_prompt_that_does_not_fit_is_an_overflow(chat: Chat) -> None:
    async def agent(base_url: str, sample: Sample) -> None:
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            await ask(base_url, [{"role": "user", "content": "more " * 4000}])

    settings = {**SETTINGS, "failure_policy": {"overflow": "raise"}}
    batch, _ = build(chat, [f"said{END}"], environment=None, generate=agent, **settings)
    with pytest.raises(ContextOverflow, match="prompt is too long: "):
        await played(batch)


@pytest.mark.parametrize(("text", "failure"), [("a", EngineUnreachable), ("more " * 4000, ContextOverflow)])
async def test_an_error_that_quotes_a_refusal_is_explained_by_it_although_other_requests_were_answered_since(
    chat: Chat, text: str, failure: type[Failure]
) -> None:
    async def agent(base_url: str, sample: Sample) -> None:
        with pytest.raises(httpx.HTTPStatusError) as raised:
            await ask(base_url, [{"role": "user", "content": text}])
        await ask(base_url, [{"role": "user", "content": "b"}])
        said = raised.value.response.json()["error"]["message"]
        raise ExceptionGroup("two requests at a time", [RuntimeError(f"Error code: {said}")])

    def replies(session: str) -> list[Any]:
        return [AWAY if session.endswith("-0") and text == "a" else f"said{END}"]

    settings = {**SETTINGS, "n_samples_per_prompt": 1, "failure_policy": {"overflow": "raise"}}
    batch, _ = build(chat, replies, environment=None, generate=agent, **settings)
    with pytest.raises(failure):
        await played(batch)


async def test_an_agent_that_fails_at_a_limit_of_its_session_is_a_failure_of_the_agent(chat: Chat) -> None:
    asked, over = list[int](), anyio.Event()

    async def later() -> str:
        asked.append(1)
        await over.wait()
        return f"said{END}"

    async def agent(base_url: str, sample: Sample) -> None:
        async with anyio.create_task_group() as group:
            for at in range(32):
                group.start_soon(ask, base_url, [{"role": "user", "content": f"page {at}"}])
            while len(asked) < 32:
                await anyio.lowlevel.checkpoint()
            with pytest.raises(httpx.HTTPStatusError, match="429") as raised:
                await ask(base_url, [{"role": "user", "content": "page 32"}])
            over.set()
        raise RuntimeError(raised.value.response.json()["error"]["message"])

    settings = {**SETTINGS, "n_samples_per_prompt": 1, "failure_policy": {"agent": "raise"}}
    batch, _ = build(chat, [later], environment=None, generate=agent, **settings)
    with pytest.raises(AgentFailure, match=r"exceeds a session limit: parallel=32") as failed:
        await played(batch)
    assert failed.value.kind == "agent_limit"
