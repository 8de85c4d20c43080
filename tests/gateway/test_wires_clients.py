"""Answers and events against the types of the clients' own packages; skipped if these are not installed."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from pydantic import TypeAdapter

from agentrl.gateway.contracts import AgentTurn, Refusal
from agentrl.gateway.wires import WIRES
from tests.gateway.turns import BODIES, CHAT, MESSAGES, RESPONSES, events, failed_stream, read, sse, turns

TOOLS = [
    {"type": "custom", "name": "f"},
    {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
]


def plain(path: str, given: AgentTurn, **more: Any) -> Any:
    return orjson.loads(orjson.dumps(WIRES[path].answer(read(path, BODIES[path] | more), given)))


@settings(max_examples=30, deadline=None)
@given(given=turns())
def test_openai_chat(given: AgentTurn) -> None:
    chat = pytest.importorskip("openai.types.chat")
    state = pytest.importorskip("openai.lib.streaming.chat").ChatCompletionStreamState()
    answer = chat.ChatCompletion.model_validate(plain(CHAT, given))
    for _, data in events(CHAT, read(CHAT, BODIES[CHAT]), given)[:-1]:
        state.handle_chunk(chat.ChatCompletionChunk.model_validate(data))
    joined = state.current_completion_snapshot
    assert (joined.id, joined.usage) == (answer.id, answer.usage)
    (choice,), (whole,) = joined.choices, answer.choices
    assert (choice.finish_reason, choice.message.content or "") == (whole.finish_reason, whole.message.content)
    calls = [[call.to_dict() for call in message.tool_calls or ()] for message in (choice.message, whole.message)]
    for call in calls[0]:
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    assert calls[0] == calls[1]


@settings(max_examples=30, deadline=None)
@given(given=turns())
def test_anthropic_messages(given: AgentTurn) -> None:
    types = pytest.importorskip("anthropic.types")
    streaming = pytest.importorskip("anthropic.lib.streaming._messages")
    answer = types.Message.model_validate(plain(MESSAGES, given))
    event_type, snapshot, buffers = TypeAdapter(types.RawMessageStreamEvent), None, dict[int, bytes]()
    for _, data in events(MESSAGES, read(MESSAGES, BODIES[MESSAGES]), given):
        event = event_type.validate_python(data)
        snapshot = streaming.accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    left, right = snapshot.to_dict(), answer.to_dict()
    for block in left["content"]:
        block.pop("parsed_output", None)
    for name in ("id", "content", "stop_reason", "usage"):
        assert left[name] == right[name]


@settings(max_examples=30, deadline=None)
@given(given=turns(("bash", "f", "n__g")))
def test_openai_responses(given: AgentTurn) -> None:
    types = pytest.importorskip("openai.types.responses")
    types.Response.model_validate(plain(RESPONSES, given, tools=TOOLS))
    event_type = TypeAdapter(types.ResponseStreamEvent)
    for name, data in events(RESPONSES, read(RESPONSES, BODIES[RESPONSES] | {"tools": TOOLS}), given):
        event = event_type.validate_python(data)
        assert event.type == name
        assert not event.model_extra, "each field is one that the client knows"


def test_failed_responses() -> None:
    types = pytest.importorskip("openai.types.responses")
    streaming = pytest.importorskip("openai.lib.streaming.responses._responses")
    found = sse(failed_stream(RESPONSES, Refusal("No engine answers.", "overloaded")))
    events = [TypeAdapter(types.ResponseStreamEvent).validate_python(data) for _, data in found]
    assert [event.type for event in events] == ["response.created", "response.failed"]
    assert events[1].response.error.code == "server_error"
    state = streaming.ResponseStreamState(input_tools=[], text_format=None)
    assert [state.handle_event(event)[0].type for event in events] == [event.type for event in events]
