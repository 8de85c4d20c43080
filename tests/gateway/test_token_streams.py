"""Streams that deliver text while the model writes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat import Chat
from agentrl.chat.messages import ParsedTurn
from agentrl.engine.transport import Reply, Sink
from agentrl.engine.wire import Generation, SamplingParams
from agentrl.errors import EngineUnreachable
from agentrl.gateway import live as live_module
from agentrl.gateway import server
from agentrl.gateway.contracts import AgentTurn
from agentrl.gateway.live import LiveTurn
from agentrl.gateway.server import Gateway
from agentrl.gateway.sessions import Limits
from agentrl.gateway.wires import WIRES
from agentrl.sample import Sample
from tests.gateway.acceptance_engine import LoggingEngine, hermes
from tests.gateway.turns import BODIES, CHAT, RESPONSES, join, read, sse
from tests.support.chats import make_chat


def chat() -> Chat:
    return make_chat("qwen3")


ON_EACH = pytest.mark.parametrize("path", tuple(BODIES))
SAID = hermes("Where is it? ", "I look.", [("bash", {"command": "ls"})])
TEXTS = st.text("ab .\n<>/{}", max_size=30)
CALLS = st.lists(st.tuples(st.just("bash"), st.fixed_dictionaries({"command": TEXTS})), max_size=2)


@pytest.fixture(autouse=True, scope="module")
def no_pause() -> Iterator[None]:
    """Check after each event of the engine, without a pause."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_module, "_SECONDS", 0.0)
        yield


def reply(text: str) -> Reply:
    return Reply(200, orjson.dumps({"text": text, "meta_info": {"finish_reason": None}}))


def told(text: str) -> ParsedTurn:
    """Return a turn as the agent receives it: broken calls are text."""
    parsed = chat().turn_parser.parse(text)
    return chat().turn_parser.without_calls().parse(text) if parsed.broken else parsed


@ON_EACH
@settings(max_examples=80, deadline=None)
@given(
    thought=st.none() | TEXTS,
    content=TEXTS,
    calls=CALLS,
    broken=st.booleans(),
    cuts=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 4)), max_size=12),
)
def test_pieces_join_to_the_plain_answer(
    path: str,
    thought: str | None,
    content: str,
    calls: list[tuple[str, Any]],
    broken: bool,
    cuts: list[tuple[int, int]],
) -> None:
    text = hermes(thought, content, calls) + "\n<tool_call>\n{" * broken
    begun, request = AgentTurn("a1", 1_700_000_000, prompt_tokens=9), read(path, BODIES[path])
    parsed = told(text)
    whole = AgentTurn("a1", 1_700_000_000, parsed, "calls" if parsed.tool_calls else "stop", 9, 4, 7)
    live = LiveTurn(chat().turn_parser)
    live.begin(begun)
    stream, found = WIRES[path].events(request, live), b""
    assert live.sink is not None
    for cut, most in sorted(cuts):  # a client may be slower than the model
        live.sink(reply(text[:cut]))
        for event in islice(stream, most):
            found += event
            if not event:
                break
    live.finish(whole)
    found += b"".join(stream)
    assert join(path, sse(found)) == orjson.loads(orjson.dumps(WIRES[path].answer(request, whole)))


class WritingEngine(LoggingEngine):
    """Writes the first half of a turn, then waits for `read`; it dies there if `dies`."""

    dies: bool
    said: str = SAID
    read: asyncio.Event
    cancelled: asyncio.Event

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, *, sink: Sink = None, **more: Any
    ) -> Generation:
        if sink is not None:
            half = self.said[: self.said.index("look") + 4]
            sink(reply(half[:9]))
            sink(reply(half))
            try:
                async with asyncio.timeout(60):
                    await self.read.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            if self.dies:
                raise EngineUnreachable("the engine is gone", kind="engine_lost")
        return await super().generate(input_ids, params, **more)


@asynccontextmanager
async def serving(dies: bool = False) -> AsyncIterator[tuple[Gateway, WritingEngine, httpx.AsyncClient]]:
    engine = WritingEngine(chat(), lambda rng, prompt, params: SAID, damage=False)
    engine.read, engine.cancelled, engine.dies = asyncio.Event(), asyncio.Event(), dies
    gateway = Gateway(chat(), engine, context_length=10_000, streams=True)
    async with gateway.serving(), httpx.AsyncClient(timeout=60) as client:
        yield gateway, engine, client


@ON_EACH
@pytest.mark.parametrize("dies", [False, True])
async def test_texts_arrive_while_the_model_writes(path: str, dies: bool) -> None:
    async with serving(dies) as (gateway, engine, client):
        session = gateway.open(Sample(), SamplingParams())
        url, body = f"{gateway.url(session)}/v1{path}", {**BODIES[path], "stream": True}
        async with client.stream("POST", url, json=body) as response:
            found = ""
            async for part in response.aiter_text():
                found += part
                if "I look" in found:
                    engine.read.set()
        if dies:
            assert "the engine is gone" in found
            assert session.tree.nodes == {}
            engine.dies = False
            found = (await client.post(url, json=body)).text
        answer = join(path, sse(found.encode()))
        assert "I look." in json.dumps(answer)
        (node,) = session.tree.nodes.values()
        assert node.delivered
        assert chat().decode(node.ids).startswith(SAID)


async def test_a_stream_after_a_tools_result_has_the_answer_as_content() -> None:
    """DeepSeek's template opens the reasoning only after a user's message."""
    distill = make_chat("deepseek_r1_distill")
    engine = WritingEngine(distill, lambda rng, prompt, params: "I look.", damage=False)
    engine.said, engine.read, engine.dies = "I look.", asyncio.Event(), False
    engine.read.set()
    gateway = Gateway(distill, engine, context_length=10_000, streams=True)
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    before = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "R"},
    ]
    body = {"model": "m", "messages": [*BODIES[CHAT]["messages"], *before], "stream": True}
    async with gateway.serving(), httpx.AsyncClient(timeout=60) as client:
        found = await client.post(f"{gateway.url(gateway.open(Sample(), SamplingParams()))}/v1{CHAT}", json=body)
    message = join(CHAT, sse(found.content))["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == ("I look.", None)


async def test_a_response_is_created_at_once_and_events_keep_its_stream_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codex ends a stream without events. The client of openai ends a stream in which the id changes."""
    monkeypatch.setattr(server, "KEEP_ALIVE", 0)
    engine = LoggingEngine(chat(), lambda *_: EngineUnreachable("the engine is gone"), damage=False)
    engine.gate, gateway = asyncio.Event(), Gateway(chat(), engine, context_length=10_000)
    async with asyncio.timeout(60), gateway.serving(), httpx.AsyncClient(timeout=60) as client:
        url = f"{gateway.url(gateway.open(Sample(), SamplingParams()))}/v1{RESPONSES}"
        found = ""
        async with client.stream("POST", url, json={**BODIES[RESPONSES], "stream": True}) as response:
            async for part in response.aiter_text():
                found += part
                if found.count("event: response.in_progress") > 2:
                    engine.gate.set()
    names, datas = zip(*sse(found.encode()), strict=True)
    assert (names[0], names[-1]) == ("response.created", "response.failed")
    assert set(names[1:-1]) == {"response.in_progress"}
    assert [data["sequence_number"] for data in datas] == list(range(len(datas)))
    assert len({data["response"]["id"] for data in datas}) == 1


async def test_text_that_the_client_does_not_get_delays_no_keep_alive() -> None:
    live = LiveTurn(chat().turn_parser)
    live.begin(AgentTurn("a1", 1_700_000_000, prompt_tokens=9))
    assert live.sink is not None
    live.sink(reply("I look. "))
    assert not await live.quiet(60)
    for written in ("<tool_call>", '<tool_call>\n{"name": "bash", "arg'):
        live.sink(reply(f"I look. {written}"))
        assert await live.quiet(0)
    live.finish(AgentTurn("a1", 1_700_000_000, ParsedTurn("I look."), "stop", 9, 4, 7))
    assert not await live.quiet(60)


async def test_a_client_that_leaves_ends_the_turn() -> None:
    path = next(iter(BODIES))
    async with serving() as (gateway, engine, client):
        session = gateway.open(Sample(), SamplingParams())
        url = f"{gateway.url(session)}/v1{path}"
        async with client.stream("POST", url, json={**BODIES[path], "stream": True}) as response:
            async for part in response.aiter_text():
                if "look" in part:
                    break
        async with asyncio.timeout(60):
            await engine.cancelled.wait()
    assert (engine.log, session.tree.nodes) == ([], {})


@ON_EACH
async def test_a_refused_request_leaves_nothing_in_memory(path: str) -> None:
    async with serving() as (gateway, _, client):
        session = gateway.open(Sample(), SamplingParams(), Limits(requests=1))
        url = f"{gateway.url(session)}/v1{path}"
        assert (await client.post(url, json=BODIES[path])).status_code == 200
        assert len(session.memo.parts) > 0
        assert (await client.post(url, json=BODIES[path])).status_code == 429
        assert session.memo.parts == {}
