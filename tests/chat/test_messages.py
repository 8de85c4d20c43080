"""The normal form of messages and tool schemas."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat import ToolCall, normalise_messages
from agentrl.chat.messages import normalise_tools
from agentrl.errors import TemplateError


@pytest.mark.parametrize(
    ("given_content", "text"),
    [
        (None, ""),
        ("a", "a"),
        ([{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}], "abc"),
        ([], ""),
    ],
)
def test_content_becomes_text(given_content: Any, text: str) -> None:
    assert normalise_messages([{"role": "user", "content": given_content}]) == [{"role": "user", "content": text}]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(key: str) -> None:
    message = {"role": "assistant", "content": "c", key: "r"}
    expected = {"role": "assistant", "content": "c", "reasoning_content": "r"}
    assert normalise_messages([message]) == [expected]


@pytest.mark.parametrize(
    "call",
    [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "1", "function": {"name": "f", "arguments": {"a": 1}}},
        {"id": "1", "name": "f", "arguments": {"a": 1}},
        ToolCall("1", "f", {"a": 1}),
        ToolCall("1", "f", '{"a": 1}'),
    ],
)
def test_calls_have_one_form(call: Any) -> None:
    [message] = normalise_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    [got] = message["tool_calls"]
    assert got["id"] == "1"
    assert got["function"]["name"] == "f"
    assert got["function"]["arguments"] == {"a": 1}


def test_arguments_that_are_not_json_stay_text() -> None:
    [message] = normalise_messages([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "print(1)"}]}])
    assert message["tool_calls"][0]["function"]["arguments"] == "print(1)"


def test_empty_calls_are_no_key() -> None:
    assert normalise_messages([{"role": "assistant", "content": "a", "tool_calls": []}]) == [
        {"role": "assistant", "content": "a"}
    ]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"content": "a"}, "role"),
        ("text", "role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "no reference"),
        ({"role": "user", "content": 3}, "int"),
        ({"role": "assistant", "tool_calls": [{"arguments": {}}]}, "name"),
    ],
)
def test_errors_name_the_message(message: Any, says: str) -> None:
    with pytest.raises(TemplateError, match=says) as caught:
        normalise_messages([{"role": "user", "content": "fine"}, message])
    assert "message 1" in str(caught.value)


def test_schema_types_are_json_schema() -> None:
    parameters = {
        "type": "dict",
        "properties": {
            "type": {"type": "str", "enum": ["dict", "float"], "default": "dict"},
            "point": {"type": "tuple", "items": {"type": "float"}},
            "either": {"anyOf": [{"type": ["int", "none"]}]},
        },
        "required": ["type"],
    }
    [tool] = normalise_tools([{"name": "f", "parameters": parameters}]) or []
    assert tool["type"] == "function"
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["dict", "float"], "default": "dict"},
            "point": {"type": "array", "items": {"type": "number"}},
            "either": {"anyOf": [{"type": ["integer", "null"]}]},
        },
        "required": ["type"],
    }
    assert parameters["type"] == "dict"


def test_no_tools_and_bad_tools() -> None:
    assert normalise_tools(None) is None
    assert normalise_tools([]) is None
    with pytest.raises(TemplateError, match="tool 0"):
        normalise_tools([{"description": "no name"}])


@given(st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": st.text()})))
def test_normalising_twice_changes_nothing(messages: list[dict[str, Any]]) -> None:
    once = normalise_messages(messages)
    assert normalise_messages(once) == once == messages


HALF = "half \ud83d pair"


def test_half_a_surrogate_pair_never_reaches_a_tokenizer() -> None:
    call = {"name": HALF, "arguments": '{"a": "half \\ud83d pair"}'}
    found = normalise_messages([{"role": "assistant", "content": [HALF, "\ud83d\ude00"], "tool_calls": [call]}])[0]
    assert found["content"] == "half \ufffd pair\N{GRINNING FACE}"
    function = found["tool_calls"][0]["function"]
    assert function == {"name": "half \ufffd pair", "arguments": {"a": "half \ufffd pair"}}
