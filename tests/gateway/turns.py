"""Recorded requests of agents, turns of a model, and the clients' view of answers: the joined stream, the history."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

import orjson
from hypothesis import strategies as st

from agentrl.chat import ParsedTurn
from agentrl.chat.messages import ToolCall
from agentrl.gateway.contracts import AgentRequest, AgentTurn, Body, Refusal
from agentrl.gateway.live import LiveTurn
from agentrl.gateway.wires import WIRES
from agentrl.sample import Message

CHAT, MESSAGES, RESPONSES = "/chat/completions", "/messages", "/responses"
QUESTION = {"role": "user", "content": "What is 6 x 7?"}
BODIES: dict[str, Body] = {
    CHAT: {"model": "m", "messages": [QUESTION], "stream_options": {"include_usage": True}},
    MESSAGES: {"model": "m", "max_tokens": 100, "messages": [QUESTION], "thinking": {"type": "adaptive"}},
    RESPONSES: {"model": "m", "input": [QUESTION]},
}
"""The smallest request of each wire format for which the answer shows everything that it can."""


def recorded() -> list[tuple[str, str, Body, dict[str, str]]]:
    """Return name, path, body and headers of each recorded request."""
    found = []
    for file in sorted((Path(__file__).parent / "recorded").glob("*.json")):
        for number, request in enumerate(json.loads(file.read_text())):
            path = request["path"].split("/v1", 1)[1]
            found.append((f"{file.stem}-{number}", path, request["body"], request["headers"]))
    return found


def read(path: str, body: Body, headers: dict[str, str] | None = None) -> AgentRequest:
    """Read a request."""
    return WIRES[path].read(body, headers or {})


def turn(content: str = "42", reasoning: str | None = None, *calls: ToolCall, length: bool = False) -> AgentTurn:
    """Make a turn with fixed ids and counts."""
    parsed = ParsedTurn(content, reasoning, calls)
    return AgentTurn("a1", 1_700_000_000, parsed, "length" if length else "calls" if calls else "stop", 100, 60, 7)


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=700).map(str.strip)


@st.composite
def turns(draw: st.DrawFn, names: tuple[str, ...] = ("bash", "read")) -> AgentTurn:
    """Draw any turn that calls tools of these names."""
    calls = [
        ToolCall(
            f"call{index:05d}",
            draw(st.sampled_from(names)),
            draw(st.dictionaries(st.text(max_size=8), _json, max_size=3)),
        )
        for index in range(draw(st.integers(0, 3)))
    ]
    return turn(draw(_texts), draw(st.none() | _texts.filter(bool)), *calls, length=draw(st.booleans()))


def history(path: str, answer: Body) -> list[Body]:
    """Return the messages or items by which a client repeats an answer in its next request."""
    if path == CHAT:
        return [answer["choices"][0]["message"]]
    if path == MESSAGES:
        return [{"role": "assistant", "content": answer["content"]}]
    return list(answer["output"])


def outputs(path: str, calls: Iterable[ToolCall]) -> list[Body]:
    """Return the messages or items by which a client sends the results of calls, and a user's text."""
    said = {"role": "user", "content": "Go on."}
    if path == CHAT:
        return [*({"role": "tool", "tool_call_id": call.id, "content": f"of {call.id}"} for call in calls), said]
    if path == MESSAGES:
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": f"of {call.id}"} for call in calls]
        return [{"role": "user", "content": [*results, {"type": "text", "text": said["content"]}]}]
    kind = "function_call_output"
    return [*({"type": kind, "call_id": call.id, "output": f"of {call.id}"} for call in calls), said]


def continued(path: str, body: Body, answer: Body, calls: Iterable[ToolCall]) -> Body:
    """Return the next request of an agent that changes nothing in its history."""
    name = "input" if path == RESPONSES else "messages"
    return {**body, name: [*body[name], *history(path, answer), *outputs(path, calls)]}


def normal(message: Message) -> tuple[str, list[tuple[str, Any]]]:
    """Return the part of an assistant's message by which histories are compared."""
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())
    ]
    return message["content"].strip(), calls


def told(given: AgentTurn) -> tuple[str, list[tuple[str, Any]]]:
    """Return the same part of a turn."""
    return normal(given.parsed.to_message())


def whole(given: AgentTurn) -> LiveTurn:
    """Return a turn that has ended."""
    live = LiveTurn()
    live.begin(given)
    live.finish(given)
    return live


def events(path: str, request: AgentRequest, given: AgentTurn) -> list[tuple[str, Any]]:
    """Return names and data of an answer's events."""
    return sse(b"".join(WIRES[path].events(request, whole(given))))


def failed_stream(path: str, refusal: Refusal) -> bytes:
    """Return a stream whose turn fails before its first token."""
    request, live = read(path, BODIES[path]), LiveTurn()
    live.begin(turn())
    begun = b"".join(takewhile(bool, WIRES[path].events(request, live)))
    return begun + WIRES[path].error_event(refusal, request, live)


def sse(stream: bytes) -> list[tuple[str, Any]]:
    """Return names and data of server-sent events."""
    found = []
    assert stream.endswith(b"\n\n")
    for block in stream[:-2].split(b"\n\n"):
        fields = dict(line.split(b": ", 1) for line in block.split(b"\n"))
        data = fields[b"data"]
        found.append((fields.get(b"event", b"").decode(), None if data == b"[DONE]" else orjson.loads(data)))
    return found


def join(path: str, found: list[tuple[str, Any]]) -> Body:
    """Return the answer that a client assembles from a stream."""
    return {CHAT: _join_chat, MESSAGES: _join_messages, RESPONSES: _join_responses}[path]([data for _, data in found])


def _join_chat(chunks: list[Any]) -> Body:
    *chunks, end = chunks
    assert end is None
    message: Body = {}
    finish, usage = None, None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            assert finish is None
            finish = choice["finish_reason"]
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    (call,) = value
                    assert call.pop("index") == len(message.setdefault("tool_calls", []))
                    message["tool_calls"].append(call)
                else:
                    message[name] = message.get(name, "") + value
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    head = {name: chunks[0][name] for name in ("id", "created", "model")}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": usage}


def _join_messages(found: list[Any]) -> Body:
    start, *found, delta, stop = found
    assert (start["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    message: Body = start["message"]
    texts: dict[int, str] = {}
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            field = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
            kind, block = event["delta"]["type"], message["content"][event["index"]]
            if kind == "input_json_delta":
                texts[event["index"]] = texts.get(event["index"], "") + event["delta"]["partial_json"]
            else:
                block[field[kind]] += event["delta"][field[kind]]
        else:
            assert event == {"type": "content_block_stop", "index": len(message["content"]) - 1}
    for index, text in texts.items():
        message["content"][index]["input"] = orjson.loads(text)
    return {**message, **delta["delta"], "usage": {**message["usage"], **delta["usage"]}}


def _join_responses(found: list[Any]) -> Body:
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    created, progress, *found, last = found
    assert (created["type"], progress["type"]) == ("response.created", "response.in_progress")
    items: list[Body] = []
    texts: dict[int, str] = {}
    for event in found:
        index = event["output_index"]
        if event["type"] == "response.output_item.added":
            texts[index] = ""
        elif event["type"].endswith(".delta"):
            texts[index] += event["delta"]
        elif event["type"] == "response.output_item.done":
            assert index == len(items)
            items.append(event["item"])
            parts = event["item"].get("content")
            item = event["item"]
            assert texts[index] == (parts[0]["text"] if parts else item.get("arguments", item.get("input")))
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["output"] == items
    return dict(last["response"])
