"""The turns of a scripted policy: answers, tool calls that fit the schemas, and typical mistakes of models; or a user's
file. A file for `--play` has one turn per line. `!NAME {"city": "Oslo"}` is a tool call. `expect reward X` is the
reward that the episode must earn. A line with `# ` first is a comment. An empty line or `---` ends an episode."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.chat import Chat
from agentrl.chat.messages import ParsedTurn, ToolCall, ToolSchema
from agentrl.chat.render_turn import render_turn, unread_call
from agentrl.errors import SettingsError, raised_as
from agentrl.sample import Message, Sample


@dataclass(frozen=True, slots=True)
class Script:
    """A policy's turns as text. The last turn repeats."""

    name: str  # what the policy does, for messages
    turns: tuple[str, ...]
    cut: bool = False  # true if turns end at the length limit instead of with an end token
    waits: int = 0  # the turn, from 1, that the policy never answers; 0: none
    holds: int = 0  # the turn, from 1, before which generation pauses as between rollouts; 0: none
    ordered: bool = True  # false if results may differ: calls of one turn may run in any order


@dataclass(slots=True)
class Lines:
    """An episode of a `--play` file. `name`: file and line of its beginning. `turns`: line number and text of each.
    `reward`: the expected reward and its line number; None: any reward."""

    name: str
    turns: list[tuple[int, str]] = field(default_factory=list)
    reward: tuple[float, int] | None = None


def read_lines(path: str) -> list[Lines]:
    """Return the episodes of a `--play` file. Raises SettingsError: it is unreadable, malformed, or has no episode."""
    with raised_as(SettingsError, f"--play {path} cannot be read", OSError, UnicodeDecodeError):
        text = Path(path).expanduser().read_text(encoding="utf-8")
    episodes, ended = list[Lines](), True
    for number, line in enumerate(text.split("\n"), start=1):
        if line.startswith("# "):
            continue
        if line.strip() in ("", "---"):
            ended = True
            continue
        if ended:
            episodes.append(Lines(f"{path} line {number}"))
        ended, episode = False, episodes[-1]
        with raised_as(SettingsError, f"{path} line {number}", ValueError):
            if expected := re.fullmatch(r"expect reward (.*)", line):
                episode.reward = float(expected[1]), number
                continue
            call_of(line)
        episode.turns.append((number, line))
    if empty := next((episode for episode in episodes if not episode.turns), None):
        raise SettingsError(f"{empty.name}: an episode without a turn; write what the model says, one turn a line")
    if not episodes:
        raise SettingsError(f"--play {path} has no turn; write what the model says, one turn a line")
    return episodes


def call_of(line: str) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of a line's tool call; None for text. Raises ValueError: it is malformed."""
    if not line.startswith("!"):
        return None
    name, _, given = line[1:].partition(" ")
    said = f"arguments are a JSON object, as in !{name} {{...}}"
    with raised_as(ValueError, said, json.JSONDecodeError):
        arguments = json.loads(given or "{}")
    if not isinstance(arguments, dict):
        raise ValueError(said)
    return name, arguments


def turn_of(chat: Chat, line: str, tools: Sequence[ToolSchema]) -> str:
    """Return a line as the model's turn; a tool call gets the markup of the chat template."""
    call = call_of(line)
    return line if call is None else render_turn(chat, calling([call]), tools)


WRONG, ANSWERS = "does not know", ("answers with the label", "answers with the label, tagged and boxed")
_MAX_TOOLS = 8


def scripts(chat: Chat, sample: Sample, tools: Sequence[ToolSchema]) -> list[Script]:
    """Return the scripts of one episode, the plainest first. `sample`: of the episode. Without a label no script
    answers. `tools`: schemas of the tools that the policy may call."""
    last, text, guess = "I do not know.", next(_texts(sample.label), None), guessed(sample)
    found = [Script(WRONG, (last,))]
    if text is not None:
        last = f"The answer is \\boxed{{{text}}}.\n<answer>{text}</answer>\n#### {text}"
        found += [Script(name, (turn,)) for name, turn in zip(ANSWERS, (text, last), strict=True)]
    found += [Script("says nothing", ("",)), Script("is cut off", ("I think that",), cut=True)]
    if not tools or not chat.report.can.tool_messages or unread_call(chat) is not None:
        return found

    def call(*called: ToolSchema) -> str:
        calls = [(tool["function"]["name"], arguments(tool, guess)) for tool in called]
        return render_turn(chat, calling(calls), tools)

    found += [Script(f"calls {t['function']['name']}, then answers", (call(t), last)) for t in tools[:_MAX_TOOLS]]
    if chat.report.can.parallel_calls:
        found.append(Script("makes two calls at once, then answers", (call(tools[0], tools[-1]), last), ordered=False))
    unknown = render_turn(chat, calling([("no_such_tool", {})]), tools)
    broken = (whole := call(tools[0]).rstrip())[: len(whole) * 2 // 3]
    return [*found, Script("calls an unknown tool, then one in broken markup", (unknown, broken, last))]


def calling(calls: Sequence[tuple[str, dict[str, Any]]]) -> Message:
    """Return an assistant message with tool calls, given their names and arguments."""
    said = (ToolCall(f"call{number:05d}", name, given) for number, (name, given) in enumerate(calls, start=1))
    return ParsedTurn("", tool_calls=tuple(said)).to_message()


def _texts(label: Any) -> Iterator[str]:
    if isinstance(label, Mapping):
        label = list(label.values())
    if isinstance(label, (list, tuple)):
        for part in label:
            yield from _texts(part)
    elif label is not None and str(label):
        yield str(label)


_GUESSES = (
    r"(?<!\w)[\"'`\u201c\u2018](?=\w)(.+?)(?<=\w)[\"'`\u201d\u2019](?!\w)",  # quoted
    r"-?[\d.]+(?: ?[-+*/^] ?-?[\d.]+)+",  # a calculation
    r"(?<=[^.!?:] )(?:[A-Z]\w+(?: [A-Z]\w+)*)",  # a name: capitals inside a sentence
    r"-?\d+(?:\.\d+)?",
)


def guessed(sample: Sample) -> str:
    """Return a text for arguments: a quoted text, a calculation, a name or a number of the prompt, or all of it."""
    prompt = sample.prompt
    said = prompt if isinstance(prompt, str) else str((prompt or [{}])[-1].get("content") or "")
    found = next((match for guess in _GUESSES if (match := re.search(guess, said))), None)
    return (found[found.lastindex or 0] if found else said) or "1"


def arguments(tool: ToolSchema, guess: str) -> dict[str, Any]:
    """Return arguments that fit the tool's schema; a text without example, default or enum is `guess`."""
    schema = tool["function"]["parameters"]
    value = _value(schema, schema, guess, iter(range(_MAX_VALUES)))
    return value if isinstance(value, dict) else {}


_MAX_VALUES, _MAX_ITEMS, _MAX_NESTED = 1000, 64, 8
"""Limits, because a schema may refer to itself in many places and ask for lists of any length."""


def _value(schema: Any, root: Mapping[str, Any], text: str, places: Iterator[int], depth: int = 0) -> Any:
    if not isinstance(schema, Mapping) or depth > _MAX_NESTED or next(places, None) is None:
        return text
    inner = partial(_value, root=root, text=text, places=places, depth=depth + 1)
    if "$ref" in schema:
        return inner((root.get("$defs") or {}).get(str(schema["$ref"]).rpartition("/")[2], {}))
    if said := [schema[key] for key in ("const", "default") if key in schema]:
        return said[0]
    if said := [schema[key] for key in ("examples", "enum") if schema.get(key)]:
        return said[0][0]
    if said := [schema[key] for key in ("anyOf", "oneOf", "allOf") if schema.get(key)]:
        return inner(said[0][0])
    kinds = schema.get("type")
    match kinds[0] if isinstance(kinds, list) and kinds else kinds:
        case "object":
            properties = schema.get("properties", {})
            return {name: inner(properties.get(name, {})) for name in schema.get("required", ())[:_MAX_VALUES]}
        case "array":
            return [inner(schema.get("items", {}))] * min(max(1, int(schema.get("minItems", 1))), _MAX_ITEMS)
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return text[: int(schema.get("maxLength", len(text)))]
