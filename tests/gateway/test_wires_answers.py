"""Answers of the three wire formats: plain, as a stream, as the history of the next request, and errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat.messages import ToolCall
from agentrl.gateway.contracts import AgentTurn, Body, Refusal, RefusalKind
from agentrl.gateway.wires import WIRES
from tests.gateway.turns import (
    BODIES,
    CHAT,
    MESSAGES,
    RESPONSES,
    continued,
    events,
    failed_stream,
    join,
    normal,
    read,
    sse,
    told,
    turn,
    turns,
    whole,
)

PATHS = tuple(BODIES)
ON_EACH = pytest.mark.parametrize("path", PATHS)
CALL = ToolCall("call00001", "bash", {"command": "ls"})
TOOLS = [
    {"type": "custom", "name": "patch"},
    {
        "type": "namespace",
        "name": "web",
        "tools": [{"type": "function", "name": "search"}, {"type": "custom", "name": "raw"}],
    },
]


@ON_EACH
@settings(max_examples=60, deadline=None)
@given(given=turns())
def test_stream_equals_plain_answer(path: str, given: AgentTurn) -> None:
    request = read(path, BODIES[path])
    answer = orjson.loads(orjson.dumps(WIRES[path].answer(request, given)))
    assert join(path, events(path, request, given)) == answer


@ON_EACH
@settings(max_examples=60, deadline=None)
@given(given=turns())
def test_unchanged_history_is_the_turn(path: str, given: AgentTurn) -> None:
    body = BODIES[path]
    request = read(path, body)
    answer = orjson.loads(orjson.dumps(WIRES[path].answer(request, given)))
    again = read(path, continued(path, body, answer, given.parsed.tool_calls))
    assert again.messages[: len(request.messages)] == request.messages
    assistant, *results, user = again.messages[len(request.messages) :]
    assert normal(assistant) == told(given)
    assert assistant.get("reasoning_content", "") == (given.parsed.reasoning or "")
    assert [message["content"] for message in results] == [f"of {call.id}" for call in given.parsed.tool_calls]
    assert user == {"role": "user", "content": "Go on."}


@settings(max_examples=40, deadline=None)
@given(given=turns(("web__search",)), text=st.text(st.characters(exclude_categories=["Cs"])))
def test_tools_with_a_form_of_their_own(given: AgentTurn, text: str) -> None:
    body = BODIES[RESPONSES] | {"tools": TOOLS}
    request = read(RESPONSES, body)
    patch, raw = ToolCall("p", "patch", {"input": text}), ToolCall("r", "web__raw", {"input": text})
    both = turn(given.parsed.content, None, *given.parsed.tool_calls, patch, raw)
    answer = WIRES[RESPONSES].answer(request, both)
    calls = [item for item in answer["output"] if item["type"] not in ("message", "reasoning")]
    assert [(call["type"], call["name"], call.get("namespace")) for call in calls] == [
        *[("function_call", "search", "web")] * len(given.parsed.tool_calls),
        ("custom_tool_call", "patch", None),
        ("custom_tool_call", "raw", "web"),
    ]
    assert calls[-1]["input"] == calls[-2]["input"] == text
    assert join(RESPONSES, events(RESPONSES, request, both)) == answer
    again = read(RESPONSES, continued(RESPONSES, body, answer, both.parsed.tool_calls))
    assert normal(again.messages[1]) == told(both)


def test_arguments_that_a_custom_tool_does_not_have_are_shown() -> None:
    request = read(RESPONSES, BODIES[RESPONSES] | {"tools": TOOLS})
    answer = WIRES[RESPONSES].answer(request, turn("", None, ToolCall("p", "patch", {"patch": "x"})))
    assert answer["output"][-1]["input"] == '{"patch": "x"}'


@pytest.mark.parametrize(("finish", "expected"), [
    ("stop", ("stop", "end_turn", ("completed", None))),
    ("calls", ("tool_calls", "tool_use", ("completed", None))),
    ("length", ("length", "max_tokens", ("completed", None))),
])  # fmt: skip
def test_finish(finish: str, expected: tuple[str, str, Any]) -> None:
    given = turn("x", None, *([CALL] if finish == "calls" else []), length=finish == "length")
    chat, messages, responses = (WIRES[path].answer(read(path, BODIES[path]), given) for path in PATHS)
    found = (responses["status"], responses["incomplete_details"])
    assert (chat["choices"][0]["finish_reason"], messages["stop_reason"], found) == expected


def test_only_the_agents_own_limit_makes_a_response_incomplete() -> None:
    """Codex, which sets no limit, asks again for an incomplete response."""
    request = read(RESPONSES, BODIES[RESPONSES] | {"max_output_tokens": 7})
    answer = WIRES[RESPONSES].answer(request, turn("x", length=True))
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert events(RESPONSES, request, turn("x", length=True))[-1][0] == "response.incomplete"
    looser = read(RESPONSES, BODIES[RESPONSES] | {"max_output_tokens": 8})
    assert WIRES[RESPONSES].answer(looser, turn("x", length=True))["status"] == "completed", "the run's own limit"


@pytest.mark.parametrize(("calls", "expected"), [((), "stop_sequence"), ((CALL,), "tool_use")])
def test_a_stop_string_is_the_reason_unless_calls_wait_for_results(calls: Any, expected: str) -> None:
    given = replace(turn("x", None, *calls), stop="END")
    answer = WIRES[MESSAGES].answer(read(MESSAGES, BODIES[MESSAGES]), given)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (expected, "END")


def test_usage() -> None:
    chat, messages, responses = (WIRES[path].answer(read(path, BODIES[path]), turn())["usage"] for path in PATHS)
    assert (chat["prompt_tokens"], chat["prompt_tokens_details"]["cached_tokens"], chat["total_tokens"]) == (
        100,
        60,
        107,
    )
    # Anthropic's clients add the three numbers.
    assert (messages["input_tokens"], messages["cache_read_input_tokens"], messages["output_tokens"]) == (40, 60, 7)
    assert (responses["input_tokens"], responses["input_tokens_details"]["cached_tokens"]) == (100, 60)


def test_usage_of_a_chat_stream_is_sent_if_asked_for() -> None:
    quiet = events(CHAT, read(CHAT, {"messages": BODIES[CHAT]["messages"]}), turn())
    assert not any("usage" in data for _, data in quiet if data)
    asked = events(CHAT, read(CHAT, BODIES[CHAT]), turn())
    assert [data["usage"] is not None for _, data in asked[:-1]] == [False] * (len(asked) - 2) + [True]


def test_thinking_is_shown_if_asked_for() -> None:
    """Programs that do not request thinking take the first block for the text."""
    silent = {**BODIES[MESSAGES], "thinking": {"type": "disabled"}}
    answer = WIRES[MESSAGES].answer(read(MESSAGES, silent), turn("42", "6 x 7"))
    assert answer["content"] == [{"type": "text", "text": "42"}]


@ON_EACH
def test_ids_of_calls_are_kept(path: str) -> None:
    answer = WIRES[path].answer(read(path, BODIES[path]), turn("", None, CALL))
    assert '"call00001"' in orjson.dumps(answer).decode()


@ON_EACH
def test_long_text_is_cut(path: str) -> None:
    found = events(path, read(path, BODIES[path]), turn("abc" * 500, "why" * 500))
    assert sum(b"abcabc" in orjson.dumps(data) for _, data in found) >= 8


@ON_EACH
def test_numbers_beyond_json_s_reach(path: str) -> None:
    call = ToolCall("c", "f", {"a": 10**30, "b": math.nan, "c": -5})
    request = read(path, BODIES[path])
    raw = orjson.dumps(WIRES[path].answer(request, turn("", None, call)))
    assert join(path, events(path, request, turn("", None, call))) == orjson.loads(raw)


@ON_EACH
def test_whole_numbers_of_64_bits_are_exact(path: str) -> None:
    numbers = {"a": 2**63, "b": -(2**63), "c": 2**64 - 1, "d": 1_234_567_890_123_456_789}
    request, given = read(path, BODIES[path]), turn("", None, ToolCall("c", "f", numbers))
    again = read(path, continued(path, BODIES[path], join(path, events(path, request, given)), given.parsed.tool_calls))
    assert normal(again.messages[1]) == ("", [("f", numbers)])


KINDS: list[tuple[RefusalKind, int, str, str | None, int, str]] = [
    ("invalid", 400, "invalid_request_error", "invalid_request", 400, "invalid_request_error"),
    ("not_found", 404, "invalid_request_error", "not_found", 404, "not_found_error"),
    ("context", 400, "invalid_request_error", "context_length_exceeded", 400, "invalid_request_error"),
    ("limit", 429, "requests", "rate_limit_exceeded", 429, "rate_limit_error"),
    ("overloaded", 503, "server_error", "server_error", 529, "overloaded_error"),
    ("failed", 502, "server_error", "server_error", 502, "api_error"),
]


@pytest.mark.parametrize(("kind", "status", "openai", "code", "other_status", "anthropic"), KINDS)
def test_errors(kind: RefusalKind, status: int, openai: str, code: str, other_status: int, anthropic: str) -> None:
    refusal = Refusal("prompt is too long: 9 tokens > 8 maximum", kind, "requests" if kind == "limit" else "")
    body: Body = {"error": {"message": str(refusal), "type": openai, "param": None, "code": code}}
    for path in (CHAT, RESPONSES):
        assert WIRES[path].status(refusal) == status
        assert WIRES[path].error(refusal) == body
    assert sse(failed_stream(CHAT, refusal)) == [("", body)]
    other = {"type": "error", "error": {"type": anthropic, "message": str(refusal)}}
    assert WIRES[MESSAGES].status(refusal) == other_status
    assert WIRES[MESSAGES].error(refusal) == other
    assert sse(failed_stream(MESSAGES, refusal)) == [("error", other)]
    (created, begun), (failed, data) = sse(failed_stream(RESPONSES, refusal))
    assert (created, failed) == ("response.created", "response.failed")
    assert data["response"]["error"] == {"code": code, "message": str(refusal)}
    assert begun["response"]["id"] == data["response"]["id"] == "resp_a1"
    assert (begun["sequence_number"], data["sequence_number"]) == (0, 1)


@pytest.mark.parametrize(("path", "start"), [
    (CHAT, b": keep-alive\n"), (MESSAGES, b"event: ping\n"), (RESPONSES, b"event: response.in_progress\n"),
])  # fmt: skip
def test_keep_alive_is_a_whole_event(path: str, start: bytes) -> None:
    keep = WIRES[path].keep_alive(read(path, BODIES[path]), whole(turn()))
    assert keep.startswith(start)
    assert keep.endswith(b"\n\n")
