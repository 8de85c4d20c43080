"""What a scripted policy writes: answers, tool calls made from the tools' schemas, and the mistakes that models make."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.chat import Chat
from agentrl.chat.messages import ToolSchema
from agentrl.chat.written import unread_call, written
from agentrl.sample import Message


@dataclass(frozen=True, slots=True)
class Script:
    """A policy's turns as text, the last of which repeats.

    Attributes:
        name: what the policy does, for people.
        cut: its turns end at the length limit instead of with an end token.
        waits: the turn, from 1, that it never answers; 0 for none.
        holds: the turn, from 1, before which generating is held as between two rollouts; 0 for none.
        ordered: that the same is to come of it whenever it is played; calls at once may run in any order.
    """

    name: str
    turns: tuple[str, ...]
    cut: bool = False
    waits: int = 0
    holds: int = 0
    ordered: bool = True


WRONG, ANSWERS = "does not know", ("answers with the label", "answers with the label, tagged and boxed")
_MOST_TOOLS = 8


def scripts(chat: Chat, label: Any, tools: Sequence[ToolSchema]) -> list[Script]:
    """What a policy may do in one episode, the plainest first.

    Args:
        label: of the episode's sample; None has no answer.
        tools: what it may call.
    """
    last, text = "I do not know.", next(_texts(label), None)
    found = [Script(WRONG, (last,))]
    if text is not None:
        last = f"The answer is \\boxed{{{text}}}.\n<answer>{text}</answer>\n#### {text}"
        found += [Script(name, (turn,)) for name, turn in zip(ANSWERS, (text, last), strict=True)]
    found += [Script("says nothing", ("",)), Script("is cut off", ("I think that",), cut=True)]
    if not tools or not chat.report.can.tool_messages or unread_call(chat) is not None:
        return found

    def call(*called: ToolSchema) -> str:
        calls = [(tool["function"]["name"], arguments(tool, label)) for tool in called]
        return written(chat, calling(calls), tools)

    for tool in tools[:_MOST_TOOLS]:
        found.append(Script(f"calls {tool['function']['name']}, then answers", (call(tool), last)))
    if chat.report.can.parallel_calls:
        both = call(tools[0], tools[-1])
        found.append(Script("makes two calls at once, then answers", (both, last), ordered=False))
    unknown = written(chat, calling([("no_such_tool", {})]), tools)
    broken = call(tools[0]).rstrip()
    found.append(
        Script("calls an unknown tool, then one in broken markup", (unknown, broken[: len(broken) * 2 // 3], last))
    )
    return found


def calling(calls: Sequence[tuple[str, dict[str, Any]]]) -> Message:
    """An assistant's message with tool calls, by name and arguments."""
    said = [
        {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for number, (name, given) in enumerate(calls, start=1)
    ]
    return {"role": "assistant", "content": "", "tool_calls": said}


def _texts(label: Any) -> Iterator[str]:
    if isinstance(label, Mapping):
        label = list(label.values())
    if isinstance(label, (list, tuple)):
        for part in label:
            yield from _texts(part)
    elif label is not None and str(label):
        yield str(label)


def arguments(tool: ToolSchema, label: Any) -> dict[str, Any]:
    """Arguments that fit the tool's schema; a text is the label."""
    schema = tool["function"]["parameters"]
    value = _value(schema, schema, next(_texts(label), "1"))
    return value if isinstance(value, dict) else {}


def _value(schema: Mapping[str, Any], root: Mapping[str, Any], text: str, depth: int = 0) -> Any:
    if "$ref" in schema and depth < 8:
        return _value(root.get("$defs", {}).get(schema["$ref"].rpartition("/")[2], {}), root, text, depth + 1)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _value(schema[key][0], root, text, depth + 1)
    kinds = schema.get("type")
    match kinds[0] if isinstance(kinds, list) and kinds else kinds:
        case "object":
            properties = schema.get("properties", {})
            return {
                name: _value(properties.get(name, {}), root, text, depth + 1) for name in schema.get("required", ())
            }
        case "array":
            return [_value(schema.get("items", {}), root, text, depth + 1)] * max(1, schema.get("minItems", 1))
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return text[: schema.get("maxLength")]
