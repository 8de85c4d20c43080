"""Requests of the three wire formats: recorded ones, every refusal by the field's name, and damaged ones."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest

from agentrl.chat.messages import normalise_messages, normalise_tools
from agentrl.gateway.contracts import AgentRequest, Body, Refusal
from agentrl.gateway.wires import WIRES
from agentrl.gateway.wires.common import in_order_of_calls
from tests.fuzz.mutate import counts, deep, fuzz, of_tree
from tests.gateway.turns import BODIES, CHAT, MESSAGES, QUESTION, RESPONSES, events, read, recorded, turn

RECORDED = recorded()
PATHS = tuple(BODIES)
ON_EACH = pytest.mark.parametrize("path", PATHS)


def shapes(request: AgentRequest) -> list[Any]:
    return [(message["role"], len(message.get("tool_calls", ()))) for message in request.messages]


@pytest.mark.parametrize(
    ("path", "body", "headers"), [given[1:] for given in RECORDED], ids=[given[0] for given in RECORDED]
)
def test_recorded_requests_are_read(path: str, body: Body, headers: dict[str, str]) -> None:
    before = json.dumps(body)
    request = read(path, body, headers)
    assert request.model == "stub-model"
    assert request.stream
    assert request.usage is (path == CHAT)
    assert len(request.tools) == len(body.get("tools", ()))
    assert request.messages == [*request.messages]
    assert "x-anthropic-billing-header" not in json.dumps(request.messages)
    assert json.dumps(body) == before, "the body belongs to the caller"
    normalise_messages(request.messages)
    normalise_tools(request.tools)


def test_claude_code_with_helpers() -> None:
    _, path, body, headers = next(given for given in RECORDED if given[0] == "claude_code_2.1.197_messages-2")
    request = read(path, body, headers)
    assert shapes(request) == [
        *(("system", 0), ("user", 0), ("system", 0), ("assistant", 2)),
        *(("tool", 0), ("tool", 0), ("assistant", 1), ("tool", 0)),
    ]
    # The second helper was ready first; the results are in the order of the calls.
    assert [m["tool_call_id"] for m in request.messages if m["role"] == "tool"][:2] == ["call_sub1_3", "call_sub2_4"]
    assert request.messages[6]["reasoning_content"] == "Thinking about it."
    assert request.messages[0]["content"].startswith("You are a Claude agent")
    assert (request.thinking, request.max_tokens, request.agent) == (True, 32000, "")
    assert {"context_management", "metadata"} <= set(request.ignored)
    assert read(*RECORDED[1][1:]).agent == "ac4a62c05a18f1e01"


def test_codex_history() -> None:
    _, path, body, headers = next(given for given in RECORDED if given[0] == "codex_0.169.0_responses-2")
    request = read(path, body, headers)
    assert shapes(request)[:6] == [*[("system", 0)] * 2, *[("user", 0)] * 2, ("assistant", 1), ("tool", 0)]
    assert request.messages[4]["reasoning_content"] == "Thinking about it."
    assert "include" in request.ignored
    assert (request.stored, read(RESPONSES, BODIES[RESPONSES]).stored) == (False, True)


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}
INNER = {"type": "function", "name": "search", "description": "Find.", "parameters": {"type": "object"}}
CODEX_TOOLS = BODIES[RESPONSES] | {
    "tools": [
        {"type": "custom", "name": "apply_patch", "description": "Edit.", "format": GRAMMAR},
        {"type": "namespace", "name": "mcp__web__", "description": "", "tools": [INNER]},
        {"type": "web_search"},
    ],
    "input": [
        QUESTION,
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "function_call", "call_id": "c2", "namespace": "mcp__web__", "name": "search", "arguments": "{}"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "found"}]},
    ],
}


def test_codex_tools() -> None:
    """A custom tool and a namespace's tool are functions to the model; their calls are returned in their own form."""
    request = read(RESPONSES, CODEX_TOOLS)
    assert [tool["function"]["name"] for tool in request.tools] == ["apply_patch", "mcp__web__search"]
    patch = request.tools[0]["function"]["parameters"]
    assert patch["required"] == ["input"]
    assert "start: /.+/s" in patch["properties"]["input"]["description"]
    assert request.ignored == ("tool:web_search",)
    calls = [call["function"] for call in request.messages[1]["tool_calls"]]
    assert [call["name"] for call in calls] == ["apply_patch", "mcp__web__search"]
    assert json.loads(calls[0]["arguments"]) == {"input": "*** Begin"}
    assert [message["content"] for message in request.messages[2:]] == ["ok", "found"]


def test_results_come_before_the_user_s_text() -> None:
    results = [
        {"type": "text", "text": "First."},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "two"}], "is_error": True},
        {"type": "tool_result", "tool_use_id": "a"},
        {"type": "text", "text": "Then.", "cache_control": {"type": "ephemeral"}},
    ]
    calls = [{"type": "tool_use", "id": name, "name": "bash", "input": {}} for name in "ab"]
    hidden = {"type": "redacted_thinking", "data": "x"}
    messages = [QUESTION, {"role": "assistant", "content": [hidden, *calls]}, {"role": "user", "content": results}]
    _, assistant, *rest = read(MESSAGES, BODIES[MESSAGES] | {"messages": messages}).messages
    assert assistant["content"] == ""
    assert rest == [
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "tool", "tool_call_id": "b", "content": "two"},
        {"role": "user", "content": "First.\n\nThen."},
    ]


@ON_EACH
def test_images_stay_between_the_texts(path: str) -> None:
    """A blank line joins neighbouring texts, with or without images. A content of texts alone is one text."""
    image = {CHAT: {"type": "image_url", "image_url": {"url": "data:x"}}, MESSAGES: IMAGE}
    image |= {RESPONSES: {"type": "input_image", "image_url": "data:x"}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, image[path], {"type": "text", "text": "c"}]
    name = "input" if path == RESPONSES else "messages"
    (message,) = read(path, BODIES[path] | {name: [{"role": "user", "content": parts}]}).messages
    assert message["content"] == [{"type": "text", "text": "a\n\nb"}, image[path], parts[3]]
    (message,) = read(path, BODIES[path] | {name: [{"role": "user", "content": parts[:2]}]}).messages
    assert message["content"] == "a\n\nb"


def test_ids_of_calls_may_repeat_in_each_turn() -> None:
    def called(*ids: str) -> Body:
        return {"role": "assistant", "content": "", "tool_calls": [{"id": one} for one in ids]}

    def told(call: str, content: str) -> Body:
        return {"role": "tool", "tool_call_id": call, "content": content}

    history = [
        called("call_0", "call_1"),
        told("call_0", "A"),
        told("call_1", "B"),
        called("call_0"),
        told("call_0", "C"),
    ]
    assert [*in_order_of_calls(history)] == history
    swapped = [history[0], history[2], history[1], *history[3:]]
    assert [*in_order_of_calls(swapped)] == history


def test_developers_are_system() -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    request = read(CHAT, {"messages": [{"role": "developer", "content": parts}, QUESTION]})
    assert request.messages[0] == {"role": "system", "content": "One.\n\nTwo."}
    request = read(RESPONSES, {"instructions": "One.", "input": "Two.", "previous_response_id": "resp_a1"})
    assert [message["role"] for message in request.messages] == ["system", "user"]
    assert (request.previous, request.instructions) == ("a1", 1)


def test_settings_of_the_session_are_counted() -> None:
    given = {"temperature": 0.2, "top_p": 0.9, "seed": None, "brand_new": {"a": 1}, "logprobs": False, "n": 1}
    request = read(CHAT, BODIES[CHAT] | given | {"tools": [{"type": "web_search"}], "tool_choice": "auto"})
    assert set(request.ignored) == {"temperature", "top_p", "brand_new", "tool:web_search"}


@ON_EACH
def test_no_choice_of_a_tool_hides_the_tools(path: str) -> None:
    tool = {"type": "function", "function": {"name": "f"}, "name": "f", "input_schema": {}, "parameters": {}}
    if path == MESSAGES:
        del tool["type"]
    body = BODIES[path] | {"tools": [tool]}
    auto: Any = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(read(path, body | {"tool_choice": auto if path == MESSAGES else "auto"}).tools) == 1
    assert read(path, body | {"tool_choice": {"type": "none"} if path == MESSAGES else "none"}).tools == []


@ON_EACH
def test_limits_and_stops(path: str) -> None:
    limit = {CHAT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}[path]
    assert read(path, BODIES[path] | {limit: 5}).max_tokens == 5
    for wrong in (0, -1, 1.5, "5", True):
        with pytest.raises(Refusal, match=limit):
            read(path, BODIES[path] | {limit: wrong})
    if path == RESPONSES:
        return
    stop = {CHAT: "stop", MESSAGES: "stop_sequences"}[path]
    assert read(path, BODIES[path] | {stop: ["a", "b"]}).stop == ("a", "b")
    for stops in (["a"] * 17, ["a" * 257], [""], [1], 3):
        with pytest.raises(Refusal, match=stop):
            read(path, BODIES[path] | {stop: stops})


def test_the_newer_limit_counts() -> None:
    assert read(CHAT, BODIES[CHAT] | {"max_tokens": 5, "max_completion_tokens": 7}).max_tokens == 7
    assert read(CHAT, BODIES[CHAT] | {"stop": "END"}).stop == ("END",)
    assert read(MESSAGES, {"messages": [QUESTION]}).max_tokens is None, "count_tokens has no limit"


SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}}
FORMS: list[tuple[str, Body, str]] = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, "title"),
    (CHAT, {"response_format": {"type": "json_object"}}, "a JSON object"),
    (MESSAGES, {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}}, "title"),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}, "title"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}, "title"),
    (RESPONSES, {"instructions": "Be brief.", "text": {"format": {"type": "json_object"}}}, "a JSON object"),
]


@pytest.mark.parametrize(("path", "form", "named"), FORMS)
def test_the_answers_form_is_asked_for_in_the_prompt(path: str, form: Body, named: str) -> None:
    plain = {name: value for name, value in form.items() if name == "instructions"}
    without, found = read(path, BODIES[path] | plain), read(path, BODIES[path] | form)
    at = found.instructions - 1 if found.instructions else 0
    (asked,) = found.messages[at : at + 1]
    assert asked["role"] == "system"
    assert named in asked["content"]
    assert [*found.messages[:at], *found.messages[at + 1 :]] == without.messages
    assert found.ignored == without.ignored


IMAGE, SOUND = {"type": "image", "source": {}}, {"type": "input_audio", "input_audio": {}}
REFUSED: list[tuple[str, Body, str]] = [
    *((path, {name: value}, name) for path in PATHS for name, value in (
        ("n", 2), ("logit_bias", {"1": 5}), ("logprobs", True), ("echo", True), ("prediction", {"type": "content"}),
        ("background", True), ("audio", {"voice": "a"}), ("modalities", ["text", "audio"]), ("model", 3), ("stream", "yes"),
        ("tools", {"a": 1}), ("tools", [3]), ("tools", [{"type": {}}]),
    )),
    *((CHAT, {"tool_choice": value}, "tool_choice") for value in ("required", {"type": "function", "function": {"name": "f"}})),
    *((MESSAGES, {"tool_choice": {"type": value}}, "tool_choice") for value in ("any", "tool")),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema: is missing"),
    (CHAT, {"response_format": {"type": "regex"}}, "response_format"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: is missing"),
    (RESPONSES, {"text": {"format": {"type": "grammar"}}}, "text.format"),
    (RESPONSES, {"conversation": "conv_1"}, "conversation"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    *((path, {"messages": []}, "messages") for path in (CHAT, MESSAGES)),
    (RESPONSES, {"input": []}, "input"),
    *((path, {"messages": [QUESTION, {"role": "assistant", "content": "4"}]}, "messages") for path in (CHAT, MESSAGES)),
    (RESPONSES, {"input": [QUESTION, {"role": "assistant", "content": "4"}]}, "messages"),
    *((path, {"messages": [{"role": "user", "content": [SOUND]}]}, "messages[0].content[0].type") for path in (CHAT, MESSAGES)),
    (CHAT, {"messages": [{"role": "system", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    *((path, {"messages": [{"role": "assistant", "content": [IMAGE]}]}, "messages[0].content[0].type") for path in (CHAT, MESSAGES)),
    (MESSAGES, {"system": [IMAGE]}, "system[0].type"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    (RESPONSES, {"input": [{"role": "developer", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    (RESPONSES, {"input": [{"type": "item_reference"}]}, "input[0].id"),
    (RESPONSES, {"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    (RESPONSES, {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
    (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}]}, "messages[0].tool_calls[0].function.name"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a"}]}]}, "messages[0].content[0].type"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [SOUND]}]}]},
     "messages[0].content[0].content[0].type"),
    (MESSAGES, {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "x"}]}]},
     "messages[0].content[0].input"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change", "name"), REFUSED)
def test_refused_by_name(path: str, change: Body, name: str) -> None:
    with pytest.raises(Refusal) as caught:
        read(path, BODIES[path] | change)
    assert name in str(caught.value)
    assert caught.value.kind == "invalid"
    assert WIRES[path].status(caught.value) == 400


@ON_EACH
def test_depth_up_to_the_limit_is_read(path: str) -> None:
    read(path, BODIES[path] | {"a": deep(62)})


def mutant(rng: random.Random) -> tuple[str, Body]:
    _, path, body, _ = rng.choice([*RECORDED, ("", RESPONSES, CODEX_TOOLS, {})])
    changed = of_tree(rng, body)
    try:
        return path, orjson.loads(orjson.dumps(changed))
    except TypeError:  # values that JSON cannot hold never arrive over HTTP
        return path, body


def read_mutant(given: tuple[str, Any]) -> tuple[str, AgentRequest]:
    return given[0], read(*given)


def usable(given: tuple[str, AgentRequest]) -> None:
    path, request = given
    orjson.dumps(WIRES[path].answer(request, turn()))
    assert events(path, request, turn())
    normalise_messages(request.messages)
    normalise_tools(request.tools)


@counts
def test_damaged_requests(count: int) -> None:
    """Any JSON value is read, or refused with a message."""
    found = fuzz(count, mutant, read_mutant, usable)
    assert set(found) == {"accepted", "Refusal"}
    assert min(found.values()) > count // 10
