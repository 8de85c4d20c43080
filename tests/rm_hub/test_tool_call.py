"""tool_call: partial credit, matching of parallel calls, wrong labels, and that no call is executed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import GraderFailure
from agentrl.rm_hub import grade
from agentrl.rm_hub.reading.calls import read_calls

LABEL = {"name": "add", "arguments": {"a": 1, "b": 2}}
values = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text("ab'\"\\ é", max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
calls = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["add", "get.weather", "find_all"]),
        "arguments": st.dictionaries(st.sampled_from(["a", "b", "city"]), values),
    }
)


def hermes(*made: Any) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in made)


def python(*made: Any) -> str:
    shown = [
        f"{call['name']}({', '.join(f'{key}={value!r}' for key, value in call['arguments'].items())})" for call in made
    ]
    return f"[{', '.join(shown)}]"


@given(st.lists(calls, min_size=1, max_size=4), st.randoms())
def test_the_same_calls_are_accepted_in_any_form_and_order(made: list[dict[str, Any]], random: Any) -> None:
    shuffled = list(made)
    random.shuffle(shuffled)
    for text in (hermes(*shuffled), json.dumps(shuffled), f"```json\n{json.dumps(shuffled)}\n```", python(*shuffled)):
        assert grade("tool_call", text, made).correct, text
    assert not grade("tool_call", hermes(*shuffled, LABEL), made).correct
    assert not grade("tool_call", hermes(*shuffled[1:]), made).correct


@pytest.mark.parametrize(
    ("made", "name", "arguments"),
    [
        ([LABEL], 1, 1),
        ([{"name": "add", "arguments": {"a": 1, "b": 3}}], 1, 0.5),
        ([{"name": "add", "arguments": {"a": 1}}], 1, 0.5),
        ([{"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}}], 1, 2 / 3),
        ([{"name": "sum", "arguments": {"a": 1, "b": 2}}], 0, 0),
        ([LABEL, LABEL], 0.5, 0.5),
        ([], 0, 0),
    ],
)
def test_partial_credit(made: list[Any], name: float, arguments: float) -> None:
    result = grade("tool_call", hermes(*made) or "no call", LABEL)
    assert result.parts == pytest.approx({"name": name, "arguments": arguments})
    assert result.score == float(made == [LABEL])


def test_parallel_calls_are_matched_so_that_as_many_as_possible_are_equal() -> None:
    label = [{"f": {"x": [1, 2]}}, {"f": {"x": [1]}}]
    made = [{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 2}}]
    assert grade("tool_call", hermes(*made), label, {"accepted_values": True}).correct


@pytest.mark.parametrize(
    "text",
    [
        "f(a=__import__('os').system('touch /tmp/x'))",
        "f(a=open('x'))",
        "(lambda: 1)()",
        "f(**{'a': 1})",
        "f(a=[x for x in y])",
        "f(1)",
    ],
)
def test_python_is_never_executed(text: str) -> None:
    result = grade("tool_call", text, {"name": "f", "arguments": {"a": 1}})
    assert result.score == 0
    assert result.reason


def test_reading_calls() -> None:
    found = read_calls("I will add.\nadd(a=1, b=-2.5, c=[True, None], d={'k': 'v'})")
    assert [(call.name, call.arguments) for call in found] == [
        ("add", {"a": 1, "b": -2.5, "c": [True, None], "d": {"k": "v"}})
    ]
    assert read_calls("The function f(x) = 2x is linear.") == []


def test_calls_of_several_turns_count_without_their_results() -> None:
    turn = "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>%s<|call|>"
    result = "<|start|>functions.add to=assistant<|channel|>commentary<|message|>3<|end|>"
    made = [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]
    text = result.join(turn % json.dumps(call["arguments"]) for call in made)
    assert grade(
        "tool_call", f"{text}{result}<|start|>assistant<|channel|>final<|message|>Done.<|return|>", made
    ).correct


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call>call:add{a:1,b:2}<tool_call|>",
        '<｜DSML｜function_calls><｜DSML｜invoke name="add"><｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>'
        '<｜DSML｜parameter name="b" string="false">2</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>',
        '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1'
        '<|close|>argument<|sep|><|open|>argument key="b" type="number"<|sep|>2<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="add"><steptml:parameter name="a">1'
        '</steptml:parameter><steptml:parameter name="b">2</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
        "<tool_calls><tool_call>add<tool_sep><arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>"
        "<arg_value>2</arg_value></tool_call></tool_calls>",
    ],
)
def test_formats_that_training_reads_are_read(text: str) -> None:
    number = {"type": "integer"}
    schema = {"name": "add", "parameters": {"type": "object", "properties": {"a": number, "b": number}}}
    metadata = {"tools": [{"type": "function", "function": schema}]}
    assert grade("tool_call", text, LABEL, metadata).correct
    assert not grade("tool_call", text, {"name": "add", "arguments": {"a": 1, "b": 3}}, metadata).correct


def test_a_mark_inside_an_argument_is_no_format() -> None:
    call = {"name": "say", "arguments": {"text": "name[ARGS] and ✿FUNCTION✿"}}
    assert grade("tool_call", json.dumps(call, ensure_ascii=False), call).correct


@pytest.mark.parametrize(
    "label",
    ["", "text", 3, {}, {"any_of": []}, {"arguments": {}}, [LABEL, "x"], {"name": "f", "arguments": 3}, '{"name": '],
)
def test_a_label_that_is_no_call_is_an_error(label: Any) -> None:
    with pytest.raises(GraderFailure) as caught:
        grade("tool_call", hermes(LABEL), label)
    assert caught.value.kind == "grader_bad_label"


@pytest.mark.parametrize(
    "metadata",
    [{"ordered": "yes"}, {"accepted_values": 1}, {"messages": "x"}, {"messages": [3]}, {"tools": "x"}, {"tools": [3]}],
)
def test_metadata_of_the_wrong_type_is_an_error(metadata: dict[str, Any]) -> None:
    with pytest.raises(GraderFailure) as caught:
        grade("tool_call", hermes(LABEL), {"f": {"x": [1]}} if "accepted_values" in metadata else LABEL, metadata)
    assert caught.value.kind == "grader_bad_metadata"


def test_accepted_values_need_lists() -> None:
    with pytest.raises(GraderFailure, match="accepted_values"):
        grade("tool_call", hermes(LABEL), LABEL, {"accepted_values": True})


@pytest.mark.parametrize(
    "text",
    [
        "{" * 300_000, '{"a":' * 60_000, "<tool_call>" * 30_000, "<tool_call>{" * 30_000, "f(" * 4000, "f(a=" + "-" * 9000 + "1)", "f(a=" + "(" * 4000,
        "```" * 100_000, "f(a=1)\n" * 40_000, "\ud800", "\0", "<function=" * 30_000, '{"name":"f","arguments":{"a":' + "9" * 5000 + "}}", "f(a=" + "1+" * 3000 + "1)",
    ],
)  # fmt: skip
@pytest.mark.timeout(120)
def test_hostile_text(text: str) -> None:
    assert not grade("tool_call", text, LABEL).correct
