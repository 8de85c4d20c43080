"""Parsers against unusual model output (recorded outputs: `acceptance`)."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat import ParsedTurn, make_parser
from agentrl.chat.parsers import FAMILIES, REASONING, Parsed, Split
from agentrl.chat.parsers.base import TAGS
from agentrl.errors import PluginError, SettingsError
from tests.support.nightly import nightly

FORMATS = sorted({family.name for family in FAMILIES.values()})

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NASTY = st.sampled_from(
    [
        "<function=f>",
        "<parameter=a>",
        "<arg_key>",
        "</arg_value>",
        "</tool_call>",
        "<tool_call>",
        "}",
        '"',
        "\\",
        "</think>",
        ";",
        "<|python_tag|>",
    ]
)
ARGUMENTS = st.dictionaries(st.text(max_size=8), JSON | NASTY, max_size=4)


@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=3), reasoning=st.sampled_from([None, "because of this"]))
def test_hermes_reads_back_any_arguments(calls: list[dict[str, Any]], reasoning: str | None) -> None:
    bodies = [json.dumps({"name": "fn", "arguments": arguments}, ensure_ascii=False) for arguments in calls]
    text = "".join(f"<tool_call>\n{body}\n</tool_call>\n" for body in bodies)
    if reasoning:
        text = f"<think>\n{reasoning}\n</think>\n\nText.\n{text}"
    turn = make_parser("hermes", "think", "").parse(text)
    assert [call.arguments for call in turn.tool_calls] == calls
    assert (turn.reasoning, turn.content, turn.broken) == (reasoning, "Text." if reasoning else "", ())
    assert [call.id for call in turn.tool_calls] == [f"call{i + 1:05d}" for i in range(len(calls))]


@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=3))
def test_llama3_reads_back_any_arguments(calls: list[dict[str, Any]]) -> None:
    text = "; ".join(json.dumps({"name": "fn", "parameters": arguments}, ensure_ascii=False) for arguments in calls)
    turn = make_parser("llama3", "none", "").parse(text)
    assert [call.arguments for call in turn.tool_calls] == calls


@given(arguments=ARGUMENTS, data=st.data())
def test_a_cut_call_is_broken_and_never_guessed(arguments: dict[str, Any], data: st.DataObject) -> None:
    body = json.dumps({"name": "fn", "arguments": arguments}, ensure_ascii=False)
    text = f"<tool_call>\n{body}\n</tool_call>"
    cut = data.draw(st.integers(len("<tool_call>"), len(text) - 1))
    turn = make_parser("hermes", "none", "").parse(text[:cut])
    assert turn.tool_calls == ()
    assert turn.broken
    llama = make_parser("llama3", "none", "").parse(body[: min(cut, len(body) - 1)])
    assert llama.tool_calls == ()


@given(text=st.text(max_size=60) | st.lists(NASTY | st.text(max_size=5), max_size=12).map("".join))
def test_parsers_never_raise(text: str) -> None:
    for family in FORMATS:
        for opened in (False, True):
            make_parser(family, "think", "").opened(opened).parse(text)


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("<tool_call>not JSON</tool_call>", 1),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', 1),
        ('<tool_call>{"arguments": {}}</tool_call>', 1),
        ('<tool_call>{"name": "f", "arguments": {}} and more</tool_call>', 1),
        ('<tool_call>{"name": "f"<tool_call>{"name": "g", "arguments": {}}</tool_call>', 1),
    ],
)
def test_broken_hermes_calls_are_reported(text: str, broken: int) -> None:
    turn = make_parser("hermes", "none", "").parse(f"before {text} after")
    assert len(turn.broken) == broken
    assert turn.content.startswith("before")
    assert turn.content.endswith("after")
    assert [call.name for call in turn.tool_calls] == (["g"] if '"g"' in text else [])


REPEATED = [
    "<tool_call>", "</tool_call>", "<tool_call>{", '<tool_call>{"name":', "<function=", "<parameter=a>",
    "<tool_call><function=f>", "<function=f><parameter=a></tool_call>", "<arg_key>a</arg_key><arg_value>",
    "<tool_call>f<arg_key>a</arg_key><arg_value>", '{"name":"a","parameters":{}}', "[", "\n",
]  # fmt: skip


@pytest.mark.parametrize("family", nightly(FORMATS, 3))
def test_degenerate_output_takes_no_time(family: str) -> None:
    """A collapsing policy repeats half a call. Reading this must not block an event loop (or this test)."""
    for unit in REPEATED:
        for opening in ("", "<tool_call>f", "<tool_call><function=f><parameter=a>"):
            make_parser(family, "think", "").parse(opening + unit * 8_000)


def test_xml_values_follow_the_schema() -> None:
    properties = {
        "n": {"type": "integer"},
        "s": {"type": "string"},
        "o": {"anyOf": [{"type": "null"}, {"type": "object"}]},
    }
    tools = [{"name": "f", "parameters": {"type": "object", "properties": properties}}]
    text = (
        "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=s>\n3\n</parameter>\n"
        '<parameter=o>\n{"a": 1}\n</parameter>\n</function>\n</tool_call>'
    )
    [call] = make_parser("qwen_xml", "none", "").parse(text, tools).tool_calls
    assert call.arguments == {"n": 3, "s": "3", "o": {"a": 1}}
    glm = "<tool_call>f<arg_key>n</arg_key><arg_value>x</arg_value><arg_key>o</arg_key><arg_value>null</arg_value></tool_call>"
    [call] = make_parser("glm", "none", "").parse(glm, tools).tool_calls
    assert call.arguments == {"n": "x", "o": None}
    malformed: list[dict[str, Any]] = [
        {"name": "f", "parameters": {"properties": {"n": {"anyOf": True}, "o": {"enum": "x"}}, "$defs": [1]}},
        {"name": "f", "parameters": {"properties": ["n"]}},
        {"name": "f", "parameters": "x"},
    ]
    for tool in malformed:
        [call] = make_parser("glm", "none", "").parse(glm, [tool]).tool_calls
        assert set(call.arguments) == {"n", "o"}


def test_a_value_follows_the_definition_that_its_schema_names() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    definitions = {"Point": point, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "boolean"}]}}
    properties = {
        "ref": {"$ref": "#/$defs/Point"},
        "optional": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
        "all": {"allOf": [{"$ref": "#/$defs/Point"}], "description": "old pydantic"},
        "level": {"enum": [1, 2]},
        "word": {"enum": ["1", "2"]},
        "loop": {"$ref": "#/$defs/Loop"},
        "absent": {"$ref": "#/$defs/None"},
    }
    parameters = {"type": "object", "properties": properties, "$defs": definitions}
    written = {"ref": '{"x": 1}', "optional": '{"x": 2}', "all": '{"x": 3}', "level": "1", "word": "1", "loop": "true"}
    written["absent"] = "4"
    values = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in written.items())
    text = f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"
    [call] = make_parser("qwen_xml", "none", "").parse(text, [{"name": "f", "parameters": parameters}]).tool_calls
    known = {"ref": {"x": 1}, "optional": {"x": 2}, "all": {"x": 3}, "level": 1, "word": "1", "loop": True}
    assert call.arguments == {**known, "absent": "4"}


def test_a_call_that_is_cut_behind_a_closing_tag_in_its_value_is_broken() -> None:
    value = "Wrap each call in <tool_call> and </tool_call>"
    cut = f"<tool_call>write<arg_key>content</arg_key><arg_value>{value}"
    parser = make_parser("glm", "none", "")
    assert (parser.parse(cut).tool_calls, parser.parse(cut).broken) == ((), (cut,))
    [call] = parser.parse(f"{cut} there.</arg_value></tool_call>").tool_calls
    assert call.arguments == {"content": f"{value} there."}


@pytest.mark.parametrize(
    "text",
    [
        "[f(a=1]]",
        "[f(a={'b': 1)])",
        "[f(1)]",
        "[f(a=g(b=1))]",
        "[f(a=(1, 2))]",
        "[f(a='x)]",
        "[f(a=open)]",
        "[f(**{})]",
    ],
)
def test_python_that_is_no_call_with_named_literals_is_broken(text: str) -> None:
    turn = make_parser("pythonic", "none", "").parse(text)
    assert (turn.tool_calls, turn.broken) == ((), (text,))


def test_strings_of_python() -> None:
    [call] = (
        make_parser("lfm2", "none", "")
        .parse(
            r"""<|tool_call_start|>[f(a='\x41\u00e9\U0001F600\d\\n', b="it's", c={"k": [-1.5, None, True]})]<|tool_call_end|>"""
        )
        .tool_calls
    )
    assert call.arguments == {"a": "Aé😀\\d\\n", "b": "it's", "c": {"k": [-1.5, None, True]}}


def test_open_reasoning_is_said_and_ends_at_a_call() -> None:
    parser = make_parser("hermes", "think", "")
    assert parser.parse("<think>hmm") == ParsedTurn("", "hmm", reasoning_open=True)
    turn = parser.opened(True).parse('hmm <tool_call>{"name": "f", "arguments": {}}</tool_call>')
    assert (turn.reasoning, len(turn.tool_calls), turn.reasoning_open) == ("hmm", 1, False)


def shout(text: str, tools: Any) -> Parsed:
    """A user's own parser, loaded by path below."""
    return Parsed("", [("shout", {"text": text})])


def whisper(text: str) -> Split:
    """A user's own splitter of reasoning."""
    before, _, after = text.partition(" so ")
    return Split(before, after)


def test_names_and_paths() -> None:
    parser = make_parser(tool_call_parser=f"{__name__}:shout", reasoning_parser=f"{__name__}:whisper", template="")
    turn = parser.parse("hm so hey")
    assert (turn.reasoning, turn.tool_calls[0].arguments) == ("hm", {"text": "hey"})
    with pytest.raises(SettingsError, match="hermes"):
        make_parser("hermess", "auto", "")
    with pytest.raises(SettingsError, match="think"):
        make_parser("auto", "thonk", "")
    for wrong in ((f"{__name__}:nothing_here", "auto"), ("auto", f"{__name__}:nothing_here")):
        with pytest.raises(PluginError):
            make_parser(*wrong, "")


SHOWN = {
    "none": "no format here",
    "minimax-m2": "{%- set begin = '<minimax:tool_call>' %}<invoke name=</think>",
    "seed_oss": "<seed:tool_call><function=f><parameter=p></seed:think>",
    "command": '<|START_ACTION|>[{"tool_name": ...}]<|END_THINKING|>',
    "nemotron": "<TOOLCALL>[...]</TOOLCALL>",
    "kimi_k2": "<|tool_call_begin|>id<|tool_call_argument_begin|>{}",
    "kimi_k3": "{{- '<|open|>' + tag + '<|sep|>' -}}{{- '<|close|>' + tag + '<|sep|>' -}}",
    "mistral": "[TOOL_CALLS] [/THINK] </think>",
    "granite": "<|start_of_role|>assistant<|end_of_role|><|tool_call|>[...]",
    "dsml": '<｜DSML｜invoke name="f"><｜tool▁call▁begin｜>',
    "llama4": '<|header_start|><|python_start|>[f(a=1)] "parameters": ',
    "ernie": '<tool_call>{"name": 1, "arguments": 2}</tool_call><response>',
}


@pytest.mark.parametrize("family", SHOWN)
def test_what_a_template_shows_picks_the_format(family: str) -> None:
    parser = make_parser("auto", "auto", SHOWN[family])
    assert parser.family.name == family
    expected = next((tags for tags in TAGS if tags.close in SHOWN[family]), None)
    assert parser.tags == (REASONING["kimi_k3"] if family == "kimi_k3" else expected)


def test_a_turn_becomes_an_assistant_message() -> None:
    turn = make_parser("hermes", "think", "").parse(
        '<think>r</think>c<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
    )
    assert turn.to_message() == {
        "role": "assistant",
        "content": "c",
        "reasoning_content": "r",
        "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}],
    }


def test_qwen_agents_marks() -> None:
    parser = make_parser("auto", "none", "✿FUNCTION✿: {{ name }}\n✿ARGS✿: {{ arguments }}")
    turn = parser.parse('Let me see.\n✿FUNCTION✿: look_up\n✿ARGS✿: {"city": "Oslo"}\n✿RESULT✿')
    assert [(call.name, call.arguments) for call in turn.tool_calls] == [("look_up", {"city": "Oslo"})]
    assert (turn.content, turn.broken) == ("Let me see.", ())
    assert parser.parse('✿FUNCTION✿: look_up\n✿ARGS✿: {"city": "Os').broken
