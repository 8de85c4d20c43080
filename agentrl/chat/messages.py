"""Model turns, chat messages, and the normal form of messages for templates (`normalise_messages`). There, `content`
is text, or a list of text parts and image references (`agentrl.media`). `arguments` is a dict if it is JSON. Reasoning
is `reasoning_content`. Keys with None are absent. `normalise_tools` returns schemas in OpenAI's function form."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from agentrl.errors import TemplateError
from agentrl.media import is_image, reference_hash
from agentrl.sample import Message

ToolSchema = dict[str, Any]
"""A tool as OpenAI writes it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # names of a message's reasoning, preferred first
_JSON_TYPES = {"dict": "object", "list": "array", "tuple": "array", "str": "string", "none": "null"}
_JSON_TYPES |= {"float": "number", "int": "integer", "bool": "boolean"}
_MAX_NESTED = 100
_FINITE = json.JSONDecoder(
    parse_float=lambda text: n if isfinite(n := float(text)) else None, parse_constant=lambda _: None
)
"""Decoder that reads NaN and infinity, which no store accepts, as None."""
_NAMED_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model wrote: `arguments` is a dict, or text if the format does not require JSON."""

    id: str
    name: str
    arguments: dict[str, Any] | str

    def to_message(self) -> dict[str, Any]:
        """Return the call in OpenAI's form, with the arguments as JSON text."""
        function = {"name": self.name, "arguments": arguments_text(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One model turn, parsed."""

    content: str  # the text for the user, without reasoning and calls, edge whitespace removed
    reasoning: str | None = None  # the reasoning; None if the turn has no reasoning
    tool_calls: tuple[ToolCall, ...] = ()  # the calls that are complete and well formed, in order
    broken: tuple[str, ...] = ()  # the raw text of each broken call; nothing is guessed from the text
    reasoning_open: bool = False  # the turn ended inside its reasoning

    def to_message(self) -> Message:
        message: Message = {"role": "assistant", "content": "\n".join(filter(None, (self.content, *self.broken)))}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_message() for call in self.tool_calls]
        return message


def arguments_text(arguments: dict[str, Any] | str) -> str:
    """Return a call's arguments as JSON text; text stays unchanged."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return `value` with `change` applied to every string in it, also in keys, lists and dicts."""
    if isinstance(value, str):
        return change(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    # `Mapping` last: isinstance with an abstract class is the slowest of these checks.
    if isinstance(value, (list, tuple)):
        return [map_texts(item, change) for item in value]
    if isinstance(value, (dict, Mapping)):
        return {map_texts(key, change): map_texts(item, change) for key, item in value.items()}
    return value


def too_deep(value: Any, most: int = _MAX_NESTED) -> bool:
    """Return true if `value` nests lists and dicts too deeply for recursive code and templates."""
    level = [value]
    for _ in range(most):
        held = [p.values() if isinstance(p, dict) else p for p in level if isinstance(p, (dict, list, tuple))]
        if not held:
            return False
        level = [item for items in held for item in items]
    return bool(level)


def whole_text(value: Any) -> Any:
    """Return `value` with lone surrogates in its strings (also in keys, lists and dicts) replaced by U+FFFD. A model
    can write a lone surrogate as a JSON escape, but no tokenizer and no file accepts such text."""
    return map_texts(value, _whole)


def _whole(text: str) -> str:
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return new messages in the normal form. Raises TemplateError: a message is not a mapping, lacks a role, is nested
    too deeply, or has content that is neither text nor a reference of an image."""
    return [_message(message, index) for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], index: int) -> Message:
    if too_deep(message):
        raise TemplateError(f"message {index}: lists and dicts are nested in it more than {_MAX_NESTED} levels deep")
    message = whole_text(message)
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TemplateError(f"message {index}: expected a mapping with a 'role', got {message!r}")
    out = {key: value for key, value in message.items() if value is not None and key not in REASONING_KEYS}
    content: Any = message.get("content")
    pictured = isinstance(content, list) and any(map(is_image, content))
    out["content"] = _parts(content, index) if pictured else _content(content, index)
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is not None:
        out["reasoning_content"] = _content(reasoning, index)
    if calls := out.pop("tool_calls", None):
        out["tool_calls"] = [_call(call, index) for call in calls]
    return out


def _content(content: Any, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        kind = type(content).__name__
        raise TemplateError(f"message {index}: content must be text or a list of text parts, got {kind}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            what = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise TemplateError(f"message {index}: only text parts can be rendered, got a part of type {what!r}")
        texts.append(text)
    return "".join(texts)


def _parts(content: list[Any], index: int) -> list[dict[str, Any]]:
    """Return content with images in the normal form: neighbouring texts are joined, and images are references."""
    out: list[dict[str, Any]] = []
    for part in content:
        if is_image(part):
            if reference_hash(part) is None:
                raise TemplateError(f"message {index}: an image is no reference; agentrl.media.take_images makes one")
            out.append({key: part[key] for key in ("type", "image", "width", "height")})
        elif text := _content([part], index):
            if out and out[-1]["type"] == "text":
                out[-1]["text"] += text
            else:
                out.append({"type": "text", "text": text})
    return out


def _call(call: Any, index: int) -> dict[str, Any]:
    if isinstance(call, ToolCall):
        call = call.to_message()
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TemplateError(f"message {index}: a tool call needs a function name, got {call!r}")
    out = {"type": "function", "function": {**function, "arguments": _arguments(function.get("arguments"))}}
    if call.get("id") is not None:
        out["id"] = str(call["id"])
    return out


def _arguments(arguments: Any) -> Any:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            value = _FINITE.decode(arguments)
        except (ValueError, RecursionError):
            return arguments
        return whole_text(value) if isinstance(value, dict) and not too_deep(value) else arguments
    return arguments


def normalise_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[ToolSchema] | None:
    """Return new schemas in OpenAI's function form; None for no tools. Raises TemplateError: a schema has no name."""
    return [_tool(tool, index) for index, tool in enumerate(tools)] if tools else None


def _tool(tool: Mapping[str, Any], index: int) -> ToolSchema:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TemplateError(f"tool {index}: expected an OpenAI function schema with a name, got {tool!r:.200}")
    out = {key: value for key, value in function.items() if key != "type"}
    out["parameters"] = map_schemas(
        function.get("parameters") or {"type": "object", "properties": {}}, _with_json_types
    )
    return {"type": "function", "function": out}


def map_schemas(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a JSON schema with `change` applied to each schema in it, inner schemas first; data and names stay."""
    if isinstance(schema, list):
        return [map_schemas(item, change) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    out = dict(schema)
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            out[key] = {name: map_schemas(sub, change) for name, sub in value.items()}
        elif key not in ("enum", "const", "default", "example", "examples", "required"):
            out[key] = map_schemas(value, change)
    return change(out)


def _with_json_types(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace Python's and BFCL's type names."""
    if "type" in schema:
        schema["type"] = map_texts(schema["type"], lambda name: _JSON_TYPES.get(name.lower(), name))
    return schema
