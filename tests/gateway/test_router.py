"""The router: one address for engines, with clients that are independent of agentrl."""

import os
import signal
import socket
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import httpx
import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.local import in_process
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import Reply
from agentrl.engine.wire import FinishReason, Generation
from agentrl.errors import EngineRejected
from agentrl.gateway import router as router_module
from agentrl.gateway.prefix_cache import Piece, PrefixCache, PrefixTree
from agentrl.gateway.router import _tokenizer, router
from agentrl.gateway.served.openai import ROUTES
from tests.engine.faults import FAST, FaultyServer, answer, late, ok, sent, serving, status, until
from tests.engine.test_interruptions import Sampler
from tests.support.nightly import nightly
from tests.support.warm import python

SETTINGS = EngineSettings(embedded_slots=8, engine_max_retries=0)
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


@asynccontextmanager
async def routed(
    model: Path, settings: EngineSettings = SETTINGS
) -> AsyncIterator[tuple[httpx.AsyncClient, EnginePool]]:
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(in_process(settings, model, ROUTES))
        pool = EnginePool([url], settings, vocab_size=512)
        await stack.enter_async_context(pool)
        address = await stack.enter_async_context(router(pool))
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=address, timeout=120)), pool


@asynccontextmanager
async def over(
    *servers: FaultyServer, settings: EngineSettings = FAST
) -> AsyncIterator[tuple[httpx.AsyncClient, EnginePool]]:
    """Yield a client of a router with faulty servers."""
    async with (
        EnginePool([server.url for server in servers], settings, vocab_size=512) as pool,
        router(pool) as url,
        httpx.AsyncClient(base_url=url, timeout=120) as client,
    ):
        yield client, pool


@pytest.fixture
async def pair(tiny_model: Path) -> AsyncIterator[tuple[httpx.AsyncClient, EnginePool]]:
    async with routed(tiny_model) as pair:
        yield pair


async def ask(client: httpx.AsyncClient, path: str = "/generate", **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_ids_get_what_the_engine_answers(pair: tuple[httpx.AsyncClient, EnginePool]) -> None:
    client, _ = pair
    got = await ask(client, input_ids=[10, 60, 61], sampling_params=GREEDY, return_logprob=True, top_logprobs_num=2)
    meta = got["meta_info"]
    assert got["output_ids"] == [id_ for _, id_, _ in meta["output_token_logprobs"]]
    assert len(got["output_ids"]) == 8 == len(meta["output_top_logprobs"])
    two = await ask(client, input_ids=[[10, 60, 61], [10, 60, 62]], sampling_params=GREEDY)
    assert len(two) == 2
    assert two[0]["output_ids"] == got["output_ids"]
    several = await ask(client, input_ids=[10, 60, 61], sampling_params={**GREEDY, "n": 3})
    assert [each["output_ids"] for each in several] == [got["output_ids"]] * 3


async def test_a_text_goes_on_with_the_ids_that_were_sampled(pair: tuple[httpx.AsyncClient, EnginePool]) -> None:
    client, _ = pair
    hot = {"temperature": 2.0, "max_new_tokens": 30, "ignore_eos": True, "skip_special_tokens": False}
    first = await ask(client, text="What is 12 plus 30?", sampling_params={**hot, "sampling_seed": 3})
    text = "What is 12 plus 30?" + first["text"]
    known = await ask(client, "/retrieve_from_text", text=text)
    plain = (await ask(client, "/v1/tokenize", prompt=text))["tokens"]
    assert known["tokens"] != plain
    assert known["tokens"][-30:] == first["output_ids"]
    assert known["rollout_logp"][-30:] == [p for p, _, _ in first["meta_info"]["output_token_logprobs"]]
    assert known["loss_mask"] == [0] * (known["token_length"] - 30) + [1] * 30
    second = await ask(client, text=text + " Go on.", sampling_params=GREEDY)
    assert second["meta_info"]["cached_tokens"] >= known["token_length"] - 1


MIDDLEWARE = """
class Counting:
    def __init__(self, app, *, router):
        self.app, router.counted = app, []
        self.router = router

    async def __call__(self, scope, receive, send):
        self.router.counted.append(scope["path"])
        if scope["path"] == "/counted":
            from starlette.responses import JSONResponse
            return await JSONResponse(self.router.counted)(scope, receive, send)
        await self.app(scope, receive, send)
"""


async def test_user_middleware_runs_before_the_router(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MIDDLEWARE)
    settings = SETTINGS.model_copy(update={"router_middleware_paths": (f"{tmp_path}/own.py:Counting",)})
    async with routed(tiny_model, settings) as (client, _):
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/counted")).json() == ["/health", "/counted"]


CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0.0, "model": "tiny"}


async def test_openai_clients_get_completions_whole_and_as_a_stream(pair: tuple[httpx.AsyncClient, EnginePool]) -> None:
    client, _ = pair
    whole = await ask(client, "/v1/chat/completions", **CHAT)
    assert whole["object"] == "chat.completion"
    assert whole["usage"]["completion_tokens"] == 6
    streamed = await client.post(
        "/v1/chat/completions", json={**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *events, done = streamed.text.strip().split("\n\n")
    chunks = [orjson.loads(event.removeprefix("data: ")) for event in events]
    assert done == "data: [DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(deltas) == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == whole["usage"]
    uncounted = {**CHAT, "stream": True, "stream_options": {"include_usage": False}}
    assert '"usage"' not in (await client.post("/v1/chat/completions", json=uncounted)).text
    plain = await ask(client, "/v1/completions", prompt="Hello", max_tokens=3, temperature=0.0)
    assert plain["choices"][0]["finish_reason"] == "length"
    sent = (await client.post("/generate", json={"text": "Hello", "sampling_params": GREEDY, "stream": True})).text
    *_, last, done = sent.strip().split("\n\n")
    assert (len(orjson.loads(last.removeprefix("data: "))["output_ids"]), done) == (8, "data: [DONE]")


async def test_clients_find_the_router_and_its_model(pair: tuple[httpx.AsyncClient, EnginePool]) -> None:
    client, _ = pair
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert (await client.get(f"/v1/models/{model['id']}")).json() == model
    assert (await client.get("/v1/models/another")).status_code == 404
    assert [(await client.head(path)).status_code for path in ("/", "/v1/models")] == [200, 200]


async def test_what_an_update_interrupts_goes_on_with_its_tokens() -> None:
    got: list[Any] = []
    async with serving(Sampler(8)) as server, over(server) as (client, pool):

        async def call() -> None:
            params = {"temperature": 1.0, "max_new_tokens": 8}
            got.append(await ask(client, input_ids=[1], sampling_params=params, return_logprob=True))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            for number in (1, 2):
                await until(partial(sent, server, number))
                await pool.pause()
                await pool.resume()
    meta = got[0]["meta_info"]
    assert got[0]["output_ids"] == [id_ for _, id_, _ in meta["output_token_logprobs"]] == list(range(10, 18))
    assert meta["finish_reason"]["type"] == "length"
    assert meta["prompt_tokens"] == 1
    assert meta["weight_versions"] == [{"version": "1", "start": 0, "end": 8}]


async def test_a_chat_that_an_update_interrupts_is_sent_again() -> None:
    async def chat(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.Response:
        finish = "stop"
        if sent(server, 1) and not sent(server, 2):
            await server.aborted.wait()
            finish = "abort"
        return web.json_response({"choices": [{"finish_reason": finish, "message": {"content": "Hi"}}]})

    got: list[Any] = []
    async with serving(chat) as server, over(server) as (client, pool), anyio.create_task_group() as group:

        async def call() -> None:
            got.append(await ask(client, "/v1/chat/completions", **CHAT))

        group.start_soon(call)
        await until(partial(sent, server, 1))
        await pool.pause()
        await pool.resume()
    assert got[0]["choices"][0]["finish_reason"] == "stop"
    assert len(server.generates) == 2


CHATS = {"messages": "/v1/messages", "input": "/v1/responses"}


@pytest.mark.parametrize("form", nightly(["named", "ids", "messages", "input"], ("named", "messages")))
async def test_conversations_stay_where_they_are_and_others_spread(form: str) -> None:
    async def reply(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.Response:
        if "input_ids" not in body:
            return web.json_response({})
        return web.json_response(answer([7], prompt_tokens=len(body["input_ids"])))

    async with serving(reply) as one, serving(reply) as two, over(one, two) as (client, _):
        for turn in (1, 2, 3):
            for talk in range(4) if turn == 1 else (0, 2, 1, 3):  # engines chosen afresh would take turns
                headers = {"X-SMG-Routing-Key": str(talk)} if form == "named" else {}
                messages = [{"role": "user", "content": str(number)} for number in (talk, *[9] * turn)]
                body: dict[str, Any] = {form: messages} if form in CHATS else {"input_ids": [talk, *[9] * turn]}
                path = CHATS.get(form, "/generate")
                if form == "messages" and turn > 1:
                    assert (await client.post(f"{path}/count_tokens", json={**body, "counted": True})).is_success
                assert (await client.post(path, json=body, headers=headers)).status_code == 200

    def talk_of(body: dict[str, Any]) -> int:
        return int(body[form][0]["content"] if form in CHATS else body["input_ids"][0])

    talks = [{talk_of(body) for body in server.generates if "counted" not in body} for server in (one, two)]
    assert sorted(map(sorted, talks)) == [[0, 2], [1, 3]]


async def test_clients_with_a_common_prefix_stay_with_the_engines_that_answered() -> None:
    async def reply(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.Response:
        answers.append(server)
        return web.json_response(answer([100 + len(answers)], prompt_tokens=len(body["input_ids"])))

    answers: list[FaultyServer] = []
    async with serving(reply) as one, serving(reply) as two, over(one, two) as (client, _):
        got = [(await ask(client, input_ids=[1, 2]))["output_ids"] for _ in range(4)]
        firsts = answers.copy()
        assert firsts == [one, two, one, two]
        order = [0, 2, 1, 3]  # engines chosen afresh would take turns
        for talk in order:
            await ask(client, input_ids=[1, 2, *got[talk], 9])
    assert answers[4:] == [firsts[talk] for talk in order]


async def test_a_request_whose_client_has_gone_is_aborted_and_one_can_be_aborted_by_its_rid() -> None:
    async with serving(late) as server, over(server) as (client, _):
        async with anyio.create_task_group() as group:
            group.start_soon(partial(client.post, "/generate", json={"input_ids": [1], "rid": "mine"}))
            await server.arrived.wait()
            group.cancel_scope.cancel()
        await until(lambda: bool(server.aborts))
        assert (await client.post("/abort_request", json={"rid": "other"})).status_code == 200
        assert server.aborts == [server.generates[0]["rid"]]
        assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 400


async def test_a_request_that_is_aborted_before_it_is_sent_has_an_answer_without_tokens() -> None:
    got: list[Any] = []
    async with serving(ok([7])) as server, over(server) as (client, pool):
        await pool.pause()

        async def call() -> None:
            got.append(await ask(client, input_ids=[1, 2], rid="mine"))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            while not got:
                assert (await client.post("/abort_request", json={"rid": "mine"})).status_code == 200
    assert got[0]["output_ids"] == server.generates == []
    assert got[0]["meta_info"]["finish_reason"] == {"type": "abort"}
    assert got[0]["meta_info"]["prompt_tokens"] == 2


async def test_errors_have_a_status_and_say_what_to_do() -> None:
    async with serving(status(400), status(500)) as server, over(server) as (client, pool):

        async def refused(path: str, expected: int, word: str, **sent: Any) -> None:
            answer = await client.post(path, **sent)
            assert answer.status_code == expected, answer.text
            assert word in answer.text

        good = {"input_ids": [1]}
        await refused("/generate", 400, "answered 400", json=good)
        await refused("/generate", 502, "after 3 attempts", json=good)
        await refused("/generate", 400, "prompt token 0 is 999", json={"input_ids": [999]})
        await refused("/generate", 400, "tokenizer", json={"text": "Hello"})
        await refused("/generate", 400, "application/json", content=b"{}")
        await refused("/generate", 400, "valid dictionary", json=[1])
        await refused("/generate", 502, "after 3 attempts", json={})
        await refused("/generate", 421, "not known", json=good, headers={"host": "evil.example"})
        await refused("/pause_generation", 404, "list_workers", json={})
        await refused("/add_worker", 400, "Field required", json={})
        await refused("/remove_worker?url=http://127.0.0.1:1", 400, "no engine of this pool")
        await refused("/add_worker?url=http://127.0.0.1:1", 503, "cannot connect")
        for header in ({"origin": "http://localhost:8000"}, {"sec-fetch-site": "same-site"}):
            await refused(f"/add_worker?url={server.url}", 403, "web pages may not", headers=header)
            await refused(f"/remove_worker?url={server.url}", 403, "web pages may not", headers=header)
        assert len(pool.urls) == 1


MESSAGE = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "stream": True}
EVENTS = ["message_start", "content_block_delta", "message_stop"]


def named(*names: str) -> bytes:
    return b"".join(b"event: %b\ndata: {}\n\n" % name.encode() for name in names)


async def stream_of(request: web.Request, first: bytes) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await stream.prepare(request)
    await stream.write(first)
    return stream


def chunk(ids: list[int], finish: str | None) -> bytes:
    """Make an event of `/generate`."""
    said = answer(ids, prompt_tokens=1, finish_reason=finish and {"type": finish})
    return b"data: %b\n\n" % orjson.dumps(said)


async def test_events_of_an_engine_come_one_by_one() -> None:
    async def reply(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        stream = await stream_of(request, named(EVENTS[0]))
        for name, next_name in pairwise(EVENTS):
            await seen[name].wait()
            await stream.write(named(next_name))
        return stream

    seen = {name: anyio.Event() for name in EVENTS}
    got = []
    with anyio.fail_after(120):
        async with (
            serving(status(500), reply) as server,
            over(server) as (client, _),
            client.stream("POST", "/v1/messages?beta=true", json=MESSAGE) as stream,
        ):
            assert stream.headers["content-type"] == "text/event-stream"
            async for line in stream.aiter_lines():
                if line.startswith("event: "):
                    got.append(line.removeprefix("event: "))
                    seen[got[-1]].set()
    assert got == EVENTS
    assert server.paths == ["POST /v1/messages?beta=true"] * 2, "one that failed before its first byte is asked again"
    assert server.generates[1] == {**MESSAGE, "rid": server.generates[1]["rid"]}


async def test_a_stream_that_breaks_ends_with_an_error_and_is_not_asked_again() -> None:
    async def reply(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        stream = await stream_of(request, named(EVENTS[0]))
        await begun.wait()
        assert request.transport is not None
        request.transport.abort()
        return stream

    begun, text = anyio.Event(), ""
    async with (
        serving(reply) as server,
        over(server) as (client, _),
        client.stream("POST", "/v1/messages", json=MESSAGE) as stream,
    ):
        async for part in stream.aiter_text():
            text += part
            begun.set()
    first, last = text.replace("\n\n\n\n", "\n\n").strip().split("\n\n")
    assert first == "event: message_start\ndata: {}"
    assert last.startswith("event: error\ndata: ")
    error = orjson.loads(last.partition("data: ")[2])
    assert (error["type"], "lost the connection to the engine" in error["error"]["message"]) == ("error", True)
    assert len(server.generates) == 1


@pytest.mark.slow
@pytest.mark.parametrize("wire", nightly(["chat", "responses", "messages"], 1))
async def test_clients_raise_the_error_of_a_stream_that_breaks(wire: str) -> None:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")

    async def reply(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        stream = await stream_of(request, b": begun\n\n")
        await begun.wait()
        assert request.transport is not None
        request.transport.abort()
        return stream

    begun, messages = anyio.Event(), MESSAGE["messages"]
    async with serving(reply) as server, over(server) as (client, _):
        options = {"api_key": "any", "max_retries": 0}
        async with (
            openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", **options) as ours,
            anthropic.AsyncAnthropic(base_url=str(client.base_url), **options) as theirs,
        ):
            asks = {
                "chat": partial(ours.chat.completions.create, messages=messages),
                "responses": partial(ours.responses.create, input=messages),
                "messages": partial(theirs.messages.create, messages=messages, max_tokens=9),
            }
            stream = await asks[wire](model="m", stream=True)
            begun.set()
            with pytest.raises((openai.APIError, anthropic.APIError), match="lost the connection to the engine"):
                assert [event async for event in stream] == []


async def test_a_client_that_leaves_its_stream_ends_the_request() -> None:
    async def reply(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        stream = await stream_of(request, named(EVENTS[0]))
        await server.aborted.wait()
        return stream

    async with serving(reply) as server, over(server) as (client, pool):
        async with client.stream("POST", "/v1/messages", json={**MESSAGE, "rid": "mine"}) as stream:
            await anext(stream.aiter_bytes())
        await until(lambda: bool(server.aborts))
        await until(lambda: not pool.members[0].in_flight)


async def test_an_update_ends_a_stream_also_if_its_client_does_not_read() -> None:
    async def reply(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        stream = await stream_of(request, named(EVENTS[0]))
        await server.aborted.wait()
        await stream.write(b": %b\n\n" % (b"x" * (1 << 24)))
        await stream.write(named(EVENTS[2]))
        return stream

    async with (
        serving(reply) as server,
        over(server) as (client, pool),
        client.stream("POST", "/v1/messages", json=MESSAGE) as stream,
    ):
        with anyio.fail_after(120):
            await pool.pause()
        raw = await stream.aread()
    assert len(raw) > 1 << 24
    assert raw.endswith(named(EVENTS[2]))
    assert len(server.generates) == 1


async def test_tokens_of_generate_come_one_by_one_and_are_remembered() -> None:
    async def reply(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        stream = await stream_of(request, chunk([5], None))
        for count in (2, 3):
            await seen[count - 1].wait()
            await stream.write(chunk([5, 6, 7][:count], None if count < 3 else "length"))
        await stream.write(b"data: [DONE]\n\n")
        return stream

    seen = {count: anyio.Event() for count in (1, 2, 3)}
    got = []
    with anyio.fail_after(120):
        async with (
            serving(status(500), reply, ok([8])) as server,
            over(server) as (client, _),
            client.stream("POST", "/generate", json={"input_ids": [1], "stream": True}) as stream,
        ):
            assert stream.headers["content-type"] == "text/event-stream"
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    got.append(orjson.loads(line.removeprefix("data: ")))
                    seen[len(got[-1]["output_ids"])].set()
    assert [event["output_ids"] for event in got] == [[5], [5, 6], [5, 6, 7]]
    assert got[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert len(server.generates) == 2, "one that failed before its first byte is asked again"
    assert server.generates[1]["stream"] is True


async def test_a_stream_of_generate_that_an_update_interrupts_ends_with_all_tokens() -> None:
    async def reply(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if body["input_ids"] != [1]:
            assert "stream" not in body
            return await ok([7])(server, body, request)
        stream = await stream_of(request, chunk([5], None))
        await server.aborted.wait()
        await stream.write(chunk([5, 6], "abort") + b"data: [DONE]\n\n")
        return stream

    body = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 3}}
    async with (
        serving(reply) as server,
        over(server) as (client, pool),
        client.stream("POST", "/generate", json=body) as stream,
    ):
        lines = stream.aiter_lines()
        first = orjson.loads((await anext(lines)).removeprefix("data: "))
        await pool.pause()
        await pool.resume()
        rest = [line async for line in lines if line]
    *others, last, done = rest
    assert (first["output_ids"], others, done) == ([5], [], "data: [DONE]")
    whole = orjson.loads(last.removeprefix("data: "))
    assert whole["output_ids"] == [5, 6, 7]
    assert whole["meta_info"]["finish_reason"]["type"] == "length"
    assert [each["input_ids"] for each in server.generates] == [[1], [1, 5, 6]]


async def test_a_grammar_that_an_update_interrupts_in_a_stream_ends_with_abort() -> None:
    async def reply(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        stream = await stream_of(request, chunk([5], None))
        await server.aborted.wait()
        await stream.write(chunk([5, 6], "abort"))
        return stream

    body = {"input_ids": [1], "stream": True, "sampling_params": {"regex": "a+"}}
    async with (
        serving(reply) as server,
        over(server) as (client, pool),
        client.stream("POST", "/generate", json=body) as stream,
    ):
        lines = stream.aiter_lines()
        await anext(lines)
        await pool.pause()
        await pool.resume()
        last, _ = [line async for line in lines if line]
    whole = orjson.loads(last.removeprefix("data: "))
    assert (whole["output_ids"], whole["meta_info"]["finish_reason"]["type"]) == ([5, 6], "abort")
    assert len(server.generates) == 1


async def test_a_stream_of_generate_that_is_refused_or_breaks_says_so() -> None:
    said = b'{"error":{"message":"longer than the context length","type":"invalid_request_error","code":400}}'

    async def refuse(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return await stream_of(request, b"data: %b\n\ndata: [DONE]\n\n" % said)

    async def broken(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        stream = await stream_of(request, chunk([5], None))
        await begun.wait()
        assert request.transport is not None
        request.transport.abort()
        return stream

    begun, text = anyio.Event(), ""
    body = {"input_ids": [1], "stream": True}
    async with serving(refuse, broken) as server, over(server) as (client, _):
        refused = await client.post("/generate", json=body)
        assert (refused.status_code, "longer than the context length" in refused.text) == (400, True)
        async with client.stream("POST", "/generate", json=body) as stream:
            async for part in stream.aiter_text():
                text += part
                begun.set()
    assert text.startswith(chunk([5], None).decode())
    assert "event: error\n" in text
    assert "lost the connection to the engine" in text
    assert len(server.generates) == 2


async def test_all_that_an_engine_has_is_passed_on_but_its_control() -> None:
    async def reply(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.Response:
        return web.Response(text="found", content_type="text/plain")

    passed = ["GET /v1/models/a/lora-memory", "POST /v1/messages/count_tokens", "GET /", "GET /v1/loads?all=1"]
    paths = ("pause_generation", "update_weights_from_disk", "release_memory_occupation", "load_lora_adapter")
    refused = [*paths, "flush_cache", "/flush_cache", "flush%5Fcache", "v1/models/%2e%2e/flush_cache", "abort_request/"]
    async with serving(reply) as server, over(server) as (client, _):
        for request in passed:
            method, path = request.split()
            got = await client.request(method, path, json={} if method == "POST" else None)
            assert (got.text, got.headers["content-type"]) == ("found", "text/plain; charset=utf-8")
        assert server.paths == passed
        assert (await client.head("/")).status_code == 200
        assert (await client.post("/v1/responses/r/cancel")).text == "found", "a POST without a body is passed on"
        for path in refused:
            for method in ("GET", "POST"):
                got = await client.request(method, f"{client.base_url}/{path}", json={})
                assert got.status_code == 404
                assert "the run controls" in got.text
        assert (await client.delete("/v1/models/a")).status_code == 405
    assert server.paths == [*passed, "GET /", "POST /v1/responses/r/cancel"]


def test_the_former_name_works() -> None:
    from agentrl.engine.router import router as former

    assert former is router


async def test_engines_come_and_go() -> None:
    async with serving(ok([7])) as one, serving(ok([8])) as two, over(one) as (client, _):
        assert (await client.get("/health")).status_code == 200
        assert (await ask(client, "/add_worker", url=two.url))["urls"] == [one.url, two.url]
        await ask(client, "/remove_worker", url=one.url)
        assert (await ask(client, input_ids=[1]))["output_ids"] == [8]
        assert (await client.get("/list_workers")).json()["workers"] == [
            {"url": two.url, "is_healthy": True, "load": 0}
        ]
        assert (await client.get("/model_info")).json()["weight_version"] == "1"
        await ask(client, "/remove_worker", url=two.url)
        assert (await client.get("/health")).status_code == 503


async def test_the_engines_keys_stay_with_the_router() -> None:
    keyed = FAST.model_copy(update={"sglang_options": {"api_key": "secret"}})
    async with serving(ok([7])) as one, serving(ok([8])) as two, over(one, settings=keyed) as (client, _):
        one.info = {"api_key": "secret", "internal_states": [{"admin_api_key": "secret", "max_running": 3}]}
        told = {"weight_version": "1", "internal_states": [{"max_running": 3}]}
        assert (await client.get("/server_info")).json() == told
        for path in (f"/add_worker?url={two.url}", f"/remove_worker?url={one.url}"):
            for headers in ({}, {"authorization": "Bearer secre"}):
                assert (await client.post(path, headers=headers)).status_code == 401
        added = await client.post(f"/add_worker?url={two.url}", headers={"authorization": "Bearer secret"})
        assert added.json()["urls"] == [one.url, two.url]


async def test_the_command_serves_engines_until_a_signal(tmp_path: Path) -> None:
    async with serving(ok([7])) as server:
        command = [python(), "-m", "agentrl", "router", server.url, "--port", "0"]
        async with await anyio.open_process(command, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
            assert process.stdout is not None
            line = (await process.stdout.receive()).decode()
            async with httpx.AsyncClient(base_url=line.removeprefix("ready on ").strip()) as client:
                assert (await ask(client, input_ids=[1]))["output_ids"] == [7]
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0


# ---- memory -------------------------------------------------------------------------------------------------------


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=30), st.integers(4, 40))
def test_the_tree_finds_the_longest_prefix_and_keeps_its_size_limit(texts: list[str], room: int) -> None:
    tree, all_of_it, kept = PrefixTree(room), PrefixTree(1 << 20), {}
    for text in texts:
        kept[text] = piece = Piece()
        all_of_it.put(text, piece)
        tree.put(text, piece)
        assert tree.size <= room
        length, found = tree.find(text + "a")
        assert found is None or found is kept[text[:length] + "a" * (length - len(text))]
        for key in texts:
            best = max((k for k in kept if key.startswith(k)), key=len, default="")
            assert all_of_it.find(key) == (len(best), kept.get(best))
    assert all_of_it.size == len({text[: n + 1] for text in texts for n in range(len(text))})


@pytest.mark.parametrize(("matched", "said"), [(2, ""), (2, "<|im_end|>"), (None, "")])
async def test_an_end_token_that_the_text_does_not_show_is_known_with_and_without_it(
    tiny_model: Path, matched: int | None, said: str
) -> None:
    memory = PrefixCache()
    memory.tokenizer = _tokenizer(tiny_model / "tokenizer.json")
    encoded: list[str] = []

    async def here(work: Any, text: str, whole: bool) -> list[int]:
        encoded.append(text)
        return list(work(text, whole))

    prompt, session = await memory.text("Hello", here)
    ids = [70, 71, 72] if matched is None else [70, 71, 2]
    text = "Hello" + str(memory.tokenizer.decode(ids[:-1] if matched else ids)) + said
    finish = FinishReason("length") if matched is None else FinishReason("stop", matched)
    got = Generation(ids, [-0.5] * 3, text[5:], finish, "1", (("1", 0, 3),), 5, 0, {})
    memory.answered("Hello", prompt, got, session)
    for shown in [text] if matched is None or said else [text, text + "<|im_end|>"]:
        whole = prompt.all_ids() + (ids[:-1] if matched and "<|im_end|>" not in shown else ids)
        piece, _ = await memory.text(shown, here)
        assert piece.all_ids() == whole
        assert piece.log_probs == array("d", [-0.5] * len(piece.ids))
    after, again = await memory.text(text + " Go on.", here)
    assert again == session
    assert encoded == ["Hello", " Go on."]
    assert after.before is not None


async def test_an_answer_without_text_leaves_the_ids_of_its_prompt_alone(tiny_model: Path) -> None:
    memory = PrefixCache()
    memory.tokenizer = _tokenizer(tiny_model / "tokenizer.json")

    async def here(work: Any, text: str, whole: bool) -> list[int]:
        return list(work(text, whole))

    prompt, session = await memory.text("Hello", here)
    got = Generation([2, 70], [-0.5] * 2, "", FinishReason("length"), "1", (("1", 0, 2),), 5, 0, {})
    memory.answered("Hello", prompt, got, session)
    again, _ = await memory.text("Hello", here)
    assert again.all_ids() == prompt.all_ids()


async def test_an_answer_whose_last_token_an_update_hit_is_whole() -> None:
    async def hit(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        await server.aborted.wait()
        finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        return web.json_response(answer([10, 11], finish_reason=finish, prompt_tokens=1, weight_version=server.version))

    got: list[Any] = []
    async with serving(hit) as server, over(server) as (client, pool):

        async def call() -> None:
            got.append(await ask(client, input_ids=[1], sampling_params={"max_new_tokens": 2}))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await until(partial(sent, server, 1))
            await pool.pause()
            await pool.resume()
    assert (got[0]["output_ids"], got[0]["meta_info"]["finish_reason"]["type"]) == ([10, 11], "length")


async def test_a_limit_of_null_means_all_of_the_context() -> None:
    async with serving(ok([5])) as server, over(server) as (client, _):
        await ask(client, input_ids=[1], sampling_params={"max_new_tokens": None, "temperature": 0})
        assert server.generates[0]["sampling_params"] == {"max_new_tokens": None, "temperature": 0}


async def test_sampling_parameters_that_are_null_are_not_given() -> None:
    async with serving(ok([5])) as server, over(server) as (client, _):
        sampling = {"temperature": None, "mystery": None, "n": None, "return_sampling_mask": None}
        await ask(client, input_ids=[1], sampling_params=sampling)
        assert server.generates[0]["sampling_params"] == {}


@pytest.mark.slow
async def test_the_command_starts_while_engines_load_or_are_stopped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # accepts connections and never answers
        address = f"127.0.0.1:{stopped.getsockname()[1]}"
        async with serving(ok([7])) as server:
            command = [python(), "-m", "agentrl", "router", address, "127.0.0.1:9", server.url, "--port", "0"]
            async with await anyio.open_process(command, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                assert (await process.stderr.receive()).startswith(b"waiting for an engine: http://127.0.0.1")
                line = (await process.stdout.receive()).decode()
                async with httpx.AsyncClient(base_url=line.removeprefix("ready on ").strip()) as client:
                    assert (await ask(client, input_ids=[1]))["output_ids"] == [7]
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0


@pytest.mark.parametrize("newest", [True, False])
async def test_a_client_that_does_not_read_its_stream_costs_little_memory(
    newest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "_MAX_UNREAD", 50)

    async def relay(sink: Callable[[Reply], None]) -> Reply:
        for number in range(10):
            sink(Reply(200, b"%d" % number * 10))
        return Reply(200, b"end")

    parts = router_module._parts(relay, newest)
    found = [(await anext(parts)).body]
    if newest:
        assert [*found, *[part.body async for part in parts]] == [b"9" * 10, b"end"]
    else:
        with pytest.raises(EngineRejected, match="unread"):
            found += [part.body async for part in parts]
        assert found == [b"0" * 10]
