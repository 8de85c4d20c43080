"""Constraints on a chat's answer: `response_format`, and `tool_choice` "required" or a named function. The form of a
call comes from the chat template's rendering of a call. A form that the parser cannot read back is refused. A model
without a parser writes a JSON list, as in SGLang. Reasoning is not constrained. The constraint is a Lark grammar."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from agentrl.chat import Chat, TurnParser
from agentrl.chat.probe import common
from agentrl.chat.render_turn import render_turn
from agentrl.engine.embedded.grammar import Grammars, schema_text
from agentrl.errors import TemplateError
from agentrl.gateway.contracts import Body
from agentrl.serving.http import openai_error

NAME, SHOWN = "zqtool", {"zqa": "zqone", "zqb": "zqtwo"}
"""Tool name and arguments of the calls that a template renders as a probe."""
_PROPERTIES = {"type": "object", "properties": {key: {"type": "string"} for key in SHOWN}}
_JSON = re.compile(r'\{\s*"zqa"\s*:\s*"zqone"\s*,\s*"zqb"\s*:\s*"zqtwo"\s*\}')
_EACH = re.compile(r"zqa(.+?)zqone(.+?)zqb\1zqtwo", re.DOTALL)
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class CallForm:
    """The text around calls, with `NAME` as the tool's name: `begin` arguments (`between` arguments)* `end`. `between`
    is None if the template writes at most one call. `parameter`: the texts before a parameter's name, after it, and
    after the value; None if arguments are a JSON object."""

    begin: str
    between: str | None
    end: str
    parameter: tuple[str, str, str] | None = None

    def reads(self, chat: Chat, name: str, arguments: dict[str, str], calls: int = 1) -> bool:
        """Return true if the chat's parser reads calls that are written in this form."""
        body = json.dumps(arguments)
        if self.parameter is not None:
            before, behind, close = self.parameter
            body = "".join(f"{before}{key}{behind}{value}{close}" for key, value in arguments.items())
        text = (self.begin + (body + (self.between or "")) * (calls - 1) + body + self.end).replace(NAME, name)
        tool = {"type": "function", "function": {"name": name, "parameters": _PROPERTIES}}
        found = chat.turn_parser.family.parse(text, [tool])
        return found.calls == [(name, arguments)] * calls and not (found.text.strip() or found.broken)


def chosen(tools: list[Any], choice: Any) -> list[Any]:
    """Return the tools that may be called. Raises RequestError: `choice` is malformed, or names an unknown tool."""
    if choice in (None, "auto", "none"):
        return [] if choice == "none" else tools
    name = _function(choice).get("name")
    if choice != "required" and not isinstance(name, str):
        raise openai_error(f"tool_choice must be 'auto', 'none', 'required' or a function, got {choice!r:.200}.")
    if not (found := [tool for tool in tools if choice == "required" or _function(tool).get("name") == name]):
        raise openai_error(f"tool_choice {name or choice!r} is none of the {len(tools)} tools that were given.")
    return found


def _function(tool: Any) -> dict[str, Any]:
    """Return the function of a tool or of a choice, in OpenAI's form or flat; empty if it has neither form."""
    found = tool.get("function", tool) if isinstance(tool, dict) else None
    return found if isinstance(found, dict) else {}


def required_output(chat: Chat, parser: TurnParser, grammars: Grammars, body: Body, tools: list[Any]) -> dict[str, str]:
    """Return the sampling parameter that forces the answer's form; empty if `body` asks for none. `tools`: the tools
    that may be called, see `chosen`. `parser`: the parser of the answer. Raises RequestError: the form is unknown, or
    cannot be forced with this chat template."""
    form: Mapping[str, Any] = body.get("response_format") or {"type": "text"}
    kind, choice = form.get("type"), body.get("tool_choice") or "auto"
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(form)}
    if kind not in ("text", "json_object", "json_schema"):
        raise openai_error(f"response_format {kind!r:.200} is not known.")
    schema = {"text": None, "json_object": {"type": "object"}}[kind] if kind != "json_schema" else form[kind]["schema"]
    free = choice in ("auto", "none")
    if free and schema is None:
        return {}
    lines = ["%llguidance {}", *_start(parser, grammars)]
    kinds = []
    if schema is not None and free:
        kinds.append("json")
        before, _, after = _turn(chat, {"role": "assistant", "content": NAME}).partition(NAME)
        lines.append(f"json: {grammars.literal(before)} %json {schema_text(schema)} {grammars.literal(after.rstrip())}")
    if tools:
        kinds.append("calls")
        single = isinstance(choice, dict) or body.get("parallel_tool_calls") is False
        lines += _calls(chat, grammars, tools, single=single)
    return {"ebnf": "\n".join([*lines, f"answer: {' | '.join(kinds)}"])}


@lru_cache(8)
def call_form(chat: Chat) -> CallForm:
    """Return the form of calls in the chat's template. Raises RequestError: the form cannot be forced."""
    for id_ in ("call{:05d}", f"functions.{NAME}:{{}}"):
        one, two = (_shown(chat, [id_.format(number) for number in range(count)]) for count in (1, 2))
        for form in (_with_json(one, two), _with_parameters(one, two)):
            if form and NAME not in form.end and form.reads(chat, "zqother", SHOWN):
                return form if form.reads(chat, "zqother", SHOWN, 2) else replace(form, between=None)
    said = f"the calls of this model ({chat.turn_parser.family.name}) cannot be forced"
    remedy = "Use tool_choice 'auto' without a response_format, or a real SGLang server"
    raise openai_error(f"tool_choice, or response_format with tools: {said}. {remedy}.")


def _shown(chat: Chat, ids: Sequence[str]) -> str:
    """Return the template's text for calls with these ids; empty if it cannot render them."""
    function = {"name": NAME, "arguments": SHOWN}
    calls = [{"id": id_, "type": "function", "function": function} for id_ in ids]
    tool = {"type": "function", "function": {"name": NAME, "description": "A tool.", "parameters": _PROPERTIES}}
    return _turn(chat, {"role": "assistant", "content": "", "tool_calls": calls}, tool)


def _turn(chat: Chat, message: dict[str, Any], *tools: Any) -> str:
    """Return the template's text for a message, without reasoning; empty if it cannot render it."""
    try:
        text = render_turn(chat, message, tools)
    except TemplateError:
        return ""
    tags = chat.turn_parser.tags
    return text.rpartition(tags.close)[2].lstrip() if tags else text


def _with_json(one: str, two: str) -> CallForm | None:
    if (found := _JSON.search(one)) is None:
        return None
    begin, end = one[: found.start()], one[found.end() :]
    return CallForm(begin, _between(two, [m.span() for m in _JSON.finditer(two)]), end)


def _with_parameters(one: str, two: str) -> CallForm | None:
    if (found := _EACH.search(one)) is None:
        return None
    begin, end = one[: found.start()], one[found.end() :]
    close = re.sub(r"<[^>]*\Z", "", end[: common(found[2], end)])
    before = found[2][len(close) :]
    if not (close and before and begin.endswith(before)):
        return None
    spans = [(m.start() - len(before), m.end() + len(close)) for m in _EACH.finditer(two)]
    parameter = before, found[1], close
    return CallForm(begin.removesuffix(before), _between(two, spans), end[len(close) :], parameter)


def _between(text: str, spans: Spans) -> str | None:
    return text[spans[0][1] : spans[1][0]] if len(spans) == 2 else None


def _start(parser: TurnParser, grammars: Grammars) -> list[str]:
    if (tags := parser.tags) is None:
        return ["start: answer"]
    opened = "" if parser.opens_reasoning else grammars.literal(tags.open)
    thought = f"space ({opened} thought space)?" if opened else "thought space"
    return [f"start: {thought} answer", grammars.until(tags.close, "thought"), r"space: /\s*/"]


def _calls(chat: Chat, grammars: Grammars, tools: Sequence[Any], *, single: bool) -> list[str]:
    if chat.turn_parser.family.name == "none":
        return [f"calls: %json {schema_text(_listed(tools, single=single))}"]
    form, lines, count = call_form(chat), [], len(tools)
    for i, tool in enumerate(tools):
        function = _function(tool)
        name = function["name"]
        if not form.reads(chat, name, {}):
            raise openai_error(f"a tool's name that its model cannot call: {name!r:.200}.")
        lines += _arguments(f"args{i}", function.get("parameters") or {"properties": {}}, form, grammars)
        lines.append(f"first{i}: {grammars.literal(form.begin.replace(NAME, name))} args{i}")
        lines.append(f"next{i}: {grammars.literal((form.between or '').replace(NAME, name))} args{i}")
    first, following = (" | ".join(f"{rule}{i}" for i in range(count)) for rule in ("first", "next"))
    more = "" if single or form.between is None else f"({following})*"
    return [*lines, f"calls: ({first}) {more} {grammars.literal(form.end)}"]


def _listed(tools: Sequence[Any], *, single: bool) -> dict[str, Any]:
    fields = [
        {"name": {"const": function["name"]}, "parameters": function.get("parameters") or {"type": "object"}}
        for function in map(_function, tools)
    ]
    calls = [{"type": "object", "properties": one, "required": ["name", "parameters"]} for one in fields]
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **({"maxItems": 1} if single else {})}


def _arguments(rule: str, schema: dict[str, Any], form: CallForm, grammars: Grammars) -> list[str]:
    if form.parameter is None:
        return [f"{rule}: %json {schema_text({'type': 'object', **schema})}"]
    before, behind, close = form.parameter
    named = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    lines, parts = [], []
    for i, (key, value) in enumerate(schema.get("properties", {}).items()):
        head, part = grammars.literal(before + key + behind), f"{rule}p{i}"
        parts.append(part if key in schema.get("required", ()) else f"{part}?")
        if "enum" not in value and _is_text(value):
            lines += [f"{part}: {head} {part}v", grammars.until(close, f"{part}v")]
            continue
        texts = value.get("enum", ()) if _is_text(value) else ()
        some = f"({' | '.join(map(grammars.literal, texts))})" if texts else f"%json {schema_text({**value, **named})}"
        lines.append(f"{part}: {head} {some} {grammars.literal(close)}")
    return [*lines, f"{rule}: {' '.join(parts)}"]


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Return true if a parameter's value is written as plain text, and not as JSON."""
    if "type" in schema:
        return "string" in schema["type"]
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return any(map(_is_text, options)) if options else "$ref" not in schema
