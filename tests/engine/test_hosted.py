"""A hosted model: the request, the parts of an answer that are read, and failures of the server."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import anyio
import pytest
from aiohttp import web

from agentrl.engine.hosted import HostedModel, read_turn, sent
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import _seconds
from agentrl.engine.wire import SamplingParams
from agentrl.errors import SECRET, ContextOverflow, EngineFailure, EngineRejected, EngineTimeout, ModelFailure
from agentrl.media import Image
from tests.engine.faults import FaultyServer, Reply, reset, retry_after, serving, status, until
from tests.support.vision import picture

PARAMS = SamplingParams(
    temperature=0.5, top_p=0.9, top_k=-1, max_new_tokens=16, stop=("###",), sampling_seed=7, no_stop_trim=True
)
ASKED = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
CALL = {"id": "c7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def completion(finish: str | None = "stop", **message: Any) -> bytes:
    """Make a chat completion with this message."""
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": None, **message}}
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}).encode()


HELLO = status(200, completion(content="Hello."))


async def silence(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    """Send no answer."""
    await anyio.sleep(60)
    return web.Response()


@asynccontextmanager
async def hosted(*script: Reply, **settings: Any) -> AsyncIterator[tuple[HostedModel, FaultyServer]]:
    """Yield a model at a server that answers by the script."""
    given = {"engine_retry_backoff": 0.0, "engine_max_retries": 2, **settings}
    async with serving(*script) as server:
        own = EngineSettings(engine="openai", base_url=f"{server.url}/v1/", hosted_model="big", **given)
        async with HostedModel(own) as model:
            yield model, server


async def test_a_request_has_what_the_api_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", " SEKRET\n")
    monkeypatch.setenv("SGLANG_API_KEY", "ANOTHER")
    options = {"top_k": 20, "max_completion_tokens": 9, "max_tokens": None}
    async with hosted(HELLO, hosted_api_key_env="MY_KEY", hosted_options=options) as (model, server):
        turn = await model.turn(ASKED, [TOOL], PARAMS)
    assert server.generates == [
        {
            "model": "big",
            "messages": ASKED,
            "tools": [TOOL],
            "temperature": 0.5,
            "top_p": 0.9,
            "stop": ["###"],
            "seed": 7,
            "top_k": 20,
            "max_completion_tokens": 9,
        }
    ]
    assert server.paths == ["POST /v1/chat/completions"]
    assert server.headers[0]["Authorization"] == "Bearer SEKRET"
    assert server.headers[0]["Accept-Encoding"] == "identity"
    assert turn.parsed.content == turn.generation.text == "Hello."
    assert (turn.generation.ids, turn.generation.log_probs) == ([], [])


async def test_without_a_key_of_its_own_a_server_is_sent_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "ANOTHER")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    async with hosted(HELLO) as (model, server):
        await model.turn(ASKED, None, PARAMS)
    assert "Authorization" not in server.headers[0]
    assert server.generates[0]["max_tokens"] == 16
    assert "tools" not in server.generates[0]


def test_calls_and_reasoning_are_used_as_given() -> None:
    turn = read_turn(completion("tool_calls", tool_calls=[CALL], reasoning="Add them."))
    (call,) = turn.parsed.tool_calls
    assert (call.id, call.name, call.arguments) == ("c7", "add", {"a": 1})
    assert turn.parsed.reasoning == "Add them."
    assert turn.message == {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "Add them."}
    assert turn.generation.meta_info == {"prompt_tokens": 5, "completion_tokens": 3}


def test_a_call_whose_arguments_are_no_object_is_broken_and_shown_as_text() -> None:
    bad = {**CALL, "function": {"name": "add", "arguments": '{"a": 1'}}
    turn = read_turn(completion("tool_calls", tool_calls=[bad, CALL]))
    assert turn.parsed.broken == ('add {"a": 1',)
    assert [call.id for call in turn.parsed.tool_calls] == ["c7"]
    assert turn.message["content"] == 'add {"a": 1'
    assert turn.message["tool_calls"] == [CALL]


def test_a_call_without_an_id_gets_one_of_its_own() -> None:
    bare = {"function": {"name": "add", "arguments": ""}}
    calls = read_turn(completion(tool_calls=[bare, bare])).parsed.tool_calls
    assert len({call.id for call in calls} - {""}) == 2
    assert calls[0].arguments == {}


def test_messages_are_sent_in_the_form_of_the_api() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    given: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "x", "own": 1},
        {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "c1", "name": "add"},
    ]
    assert sent(given, {}) == [
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "c1"}]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]


def test_images_are_sent_as_data_urls() -> None:
    image = Image.from_bytes(picture(64, 64))
    parts = [{"type": "text", "text": "Look: "}, image.reference]
    assert sent([{"role": "user", "content": parts}], {image.hash: image}) == [
        {"role": "user", "content": [parts[0], {"type": "image_url", "image_url": {"url": image.url}}]}
    ]


def test_how_an_answer_ended() -> None:
    assert read_turn(completion("length", content="cut")).generation.finish_reason.type == "length"
    assert read_turn(completion(None, content="x")).generation.finish_reason.type == "stop"
    assert read_turn(completion(refusal="I cannot.")).parsed.content == "I cannot."
    with pytest.raises(ModelFailure) as raised:
        read_turn(completion("content_filter"))
    assert raised.value.kind == "content_filter"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"choices": [',
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{"message": null}]}',
        completion(tool_calls=[{"function": {}}]),
        completion(tool_calls=5),
        completion(content=[{"type": "image_url"}]),
    ],
)
def test_a_malformed_answer_is_named(raw: bytes) -> None:
    with pytest.raises(EngineRejected) as raised:
        read_turn(raw)
    assert raised.value.kind == "malformed_answer"


@pytest.mark.parametrize("bad", [status(500), status(408), status(429), reset, status(200, b'{"choices": [')])
async def test_a_failure_that_may_pass_is_tried_again(bad: Reply) -> None:
    async with hosted(bad, bad, HELLO) as (model, server):
        assert (await model.turn(ASKED, None, PARAMS)).parsed.content == "Hello."
        assert model.figures() == {
            "engines/failed": 2.0,
            "hosted/prompt_tokens": 5.0,
            "hosted/completion_tokens": 3.0,
        }
    assert len(server.generates) == 3


@pytest.mark.parametrize("bad", [status(503), reset, status(200, b"<html>")])
async def test_the_attempts_have_an_end(bad: Reply) -> None:
    async with hosted(bad) as (model, server):
        with pytest.raises(EngineFailure):
            await model.turn(ASKED, None, PARAMS)
    assert len(server.generates) == 3


async def test_retry_after_is_waited_for() -> None:
    async with hosted(retry_after(1), HELLO) as (model, _):
        began = time.monotonic()
        await model.turn(ASKED, None, PARAMS)
        assert time.monotonic() - began >= 1


async def test_a_wait_that_outlasts_the_deadline_is_not_begun() -> None:
    async with hosted(retry_after(500), engine_request_timeout=100.0) as (model, server):
        with anyio.fail_after(30), pytest.raises(EngineTimeout, match=r"429.*the next attempt is due in \d{3} s"):
            await model.turn(ASKED, None, PARAMS)
    assert len(server.generates) == 1


def test_retry_after_is_a_number_or_a_date() -> None:
    assert [_seconds(text) for text in ("2", "0.5", "", "soon", "-3", "inf")] == [2.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    later = datetime.now(UTC) + timedelta(seconds=100)
    assert 90 < _seconds(format_datetime(later, usegmt=True)) <= 100
    assert _seconds("Fri, 31 Dec 1999 23:59:59 GMT") == 0.0


async def test_a_server_that_hangs_meets_the_deadline() -> None:
    async with hosted(silence, engine_request_timeout=0.3) as (model, _):
        with pytest.raises(EngineTimeout, match=r"big at http.* gave no turn within 0\.3 s"):
            await model.turn(ASKED, None, PARAMS)


async def test_a_refusal_is_told_once_in_the_servers_words() -> None:
    async with hosted(status(400, b'{"error": {"message": "no such parameter: seed"}}')) as (model, server):
        with pytest.raises(EngineRejected, match=r"answered 400: no such parameter: seed$") as raised:
            await model.turn(ASKED, None, PARAMS)
    assert raised.value.status == 400
    assert len(server.generates) == 1


async def test_a_wrong_address_is_recognised() -> None:
    async with hosted(status(404, b'{"detail": "Not Found"}')) as (model, _):
        with pytest.raises(EngineRejected, match="Not Found; --base-url usually ends in /v1"):
            await model.turn(ASKED, None, PARAMS)


async def test_a_conversation_that_is_too_long_is_an_overflow() -> None:
    said = b'{"error": {"message": "This model\'s maximum context length is 8 tokens."}}'
    coded = b'{"error": {"message": "Your input is too long.", "code": "context_length_exceeded"}}'
    async with hosted(status(400, said), status(400, coded)) as (model, _):
        for words in ("maximum context length", "Your input is too long"):
            with pytest.raises(ContextOverflow, match=words):
                await model.turn(ASKED, None, PARAMS)


async def test_the_key_is_in_no_message_and_in_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-SEKRET-123456")
    echo = status(401, b'{"error": {"message": "Incorrect API key: sk-SEKRET-123456"}}')
    async with hosted(echo, status(200, completion(content="It is sk-SEKRET-123456."))) as (model, server):
        with pytest.raises(EngineRejected, match=r"OPENAI_API_KEY \(--hosted-api-key-env\), which is set") as raised:
            await model.turn(ASKED, None, PARAMS)
        assert "SEKRET" not in str(raised.value)
        assert (await model.turn(ASKED, None, PARAMS)).parsed.content == f"It is {SECRET}."
        assert "SEKRET" not in repr(model._settings)
    assert server.headers[0]["Authorization"] == "Bearer sk-SEKRET-123456"


async def test_a_placeholder_for_a_key_may_be_a_word_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "token")
    async with hosted(status(200, completion(content="One token."))) as (model, _):
        turn = await model.turn(ASKED, None, PARAMS)
    assert turn.parsed.content == "One token."
    assert turn.generation.meta_info["prompt_tokens"] == 5


async def test_a_start_asks_for_a_sign_of_life() -> None:
    async with hosted(status(404)) as (model, server):
        await model.check()  # it has no list of models
    assert server.paths == ["GET /v1/models"]
    async with hosted(status(401)) as (model, _):
        with pytest.raises(EngineRejected, match="which is not set"):
            await model.check()
    gone = EngineSettings(engine="openai", base_url=f"{server.url}/v1", hosted_model="big")
    async with HostedModel(gone) as model:
        with pytest.raises(EngineFailure, match="no server answers at --base-url"):
            await model.check()


async def test_nothing_is_sent_during_a_pause() -> None:
    async with hosted(HELLO) as (model, server):
        await model.pause()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(model.turn, ASKED, None, PARAMS)
            await anyio.wait_all_tasks_blocked()
            assert server.generates == []
            await model.resume()
    assert len(server.generates) == 1


async def test_no_more_than_the_allowed_requests_are_in_flight() -> None:
    async def held(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        await server.aborted.wait()
        return await HELLO(server, body, request)

    async with hosted(held, sglang_server_concurrency=2) as (model, server), anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(model.turn, ASKED, None, PARAMS)
        await until(lambda: len(server.generates) >= 2)
        await anyio.wait_all_tasks_blocked()
        assert len(server.generates) == 2
        server.aborted.set()
    assert len(server.generates) == 5


async def test_token_ids_are_refused_by_name() -> None:
    async with hosted(HELLO) as (model, _):
        with pytest.raises(EngineRejected, match="gives no token ids and no log-probs") as raised:
            await model.generate([1, 2], PARAMS)
    assert raised.value.kind == "hosted_no_tokens"
