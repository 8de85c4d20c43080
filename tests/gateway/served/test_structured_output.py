"""Response formats that a chat requests, as grammars."""

import json
from typing import Any

import pytest

from agentrl.chat import Chat
from agentrl.chat.render_turn import render_turn
from agentrl.engine.embedded.grammar import Grammars
from agentrl.engine.embedded.model import Vocabulary
from agentrl.gateway.served.structured_output import chosen, required_output
from agentrl.serving.http import RequestError
from tests.engine.embedded.test_grammar import held
from tests.support.chats import make_chat


def required(chat: Chat, grammars: Grammars, body: dict[str, Any], tools: list[Any]) -> dict[str, str]:
    """Return the parameter for an answer to a user."""
    return required_output(chat, chat.turn_parser, grammars, body, tools)


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think", "glm4moe", "llama3_1", "deepseekv3", "gptoss"])
def test_forced_calls_are_those_that_templates_write(grammars: Grammars, vocab: Vocabulary, template: str) -> None:
    chat = make_chat(template)
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        "required": ["a"],
    }
    tools = [
        {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}
        for name in ("f", "g")
    ]
    functions = [{"name": "g", "arguments": {"a": 1, "b": "x <y>\n"}}, {"name": "f", "arguments": {"a": 2}}]
    calls = [{"id": f"call0000{i}", "type": "function", "function": one} for i, one in enumerate(functions)]
    calls = calls[:1] if template in ("llama3_1", "gptoss") else calls
    text = render_turn(chat, {"role": "assistant", "content": "", "tool_calls": calls}, tools)
    for choice, single, allowed in (("required", False, True), ({"function": {"name": "f"}}, True, False)):
        body = {"tool_choice": choice, "parallel_tool_calls": not single}
        job = held(grammars, vocab, **required(chat, grammars, body, chosen(tools, choice)))
        assert job.grammar is not None
        reason = job.grammar.advance(vocab.encode(text, 400))
        assert (reason is None) == allowed, reason


def test_what_cannot_be_forced_is_refused_by_name(grammars: Grammars) -> None:
    with pytest.raises(RequestError, match=r"lfm2.*cannot be forced"):
        required(make_chat("lfm2_v2"), grammars, {"tool_choice": "required"}, [{"function": {"name": "f"}}])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("qwen3", '<think>\nso\n</think>\n\n{"ok": true}'),
        ("qwen2_5", '{"ok": true}'),
        ("gptoss", '<|channel|>final<|message|>{"ok": true}'),
    ],
)
def test_answers_stand_where_the_template_has_them(
    grammars: Grammars, vocab: Vocabulary, template: str, text: str
) -> None:
    schema = {"properties": {"ok": {"type": "boolean"}}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    job = held(grammars, vocab, **required(make_chat(template), grammars, {"response_format": form}, []))
    assert job.grammar is not None
    assert job.grammar.advance(vocab.encode(text, 99)) is None
    assert make_chat(template).parse(text).content == '{"ok": true}'


def test_an_answer_after_a_tools_result_needs_no_reasoning(grammars: Grammars, vocab: Vocabulary) -> None:
    chat, form = make_chat("deepseekv3"), {"type": "json_schema", "json_schema": {"schema": {"enum": [1]}}}
    for ids, allowed in (([5], True), (chat.encode("<think>\n"), False)):
        found = required_output(chat, chat.parser_after(ids), grammars, {"response_format": form}, [])
        grammar = held(grammars, vocab, **found).grammar
        assert grammar is not None
        assert grammar.advance(vocab.encode("1", 9)) is None
        assert bool((grammar.advance(vocab.encode("1 more", 9)) or {}).get("status_code")) == allowed


def test_a_model_without_calls_of_its_own_writes_sglangs(grammars: Grammars, vocab: Vocabulary) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    job = held(grammars, vocab, **required(make_chat("gemma3"), grammars, {"tool_choice": "required"}, tools))
    assert job.grammar is not None
    listed = [{"name": "g", "parameters": {"a": 1}}, {"name": "f", "parameters": {}}]
    assert job.grammar.advance(vocab.encode(json.dumps(listed), 99)) is None
