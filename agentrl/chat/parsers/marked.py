"""Calls as one value after a mark: JSON, or a notation that is translated to JSON.

1. If the mark's pattern captures the tool's `name`, the value is the tool's arguments. Else the value is a call
   `{"name": ..., "arguments": {...}}`, or a list of calls. A list with a malformed call is broken.
2. The value is read as a whole, so a closing mark inside an argument does not end the call."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.chat.parsers.base import Calls, Parsed, Splitter, ToolCallParser, read_arguments, read_json

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_BESIDES = {*_NAMES, "type", "id", "tool_call_id"}  # other keys that a call without arguments may have


def marked(
    call: str,
    head: str = "",
    close: str = "",
    *,
    optional: bool = False,
    read: Callable[[str, int], tuple[Any, int] | None] = read_json,
    raw: bool = False,
    **marks: str,
) -> ToolCallParser:
    """Return the parser of a format.

    Args:
        call, close: patterns that begin and end a call; `close` is empty if the format has no end mark.
        head: pattern between `call` and the value; may capture `name`.
        optional: models may leave `close` out.
        read: returns the value that begins at a position of the text, and the position of its end.
        raw: strings are not escaped, so a broken call may contain text that looks like another call.
        marks: other patterns of `Splitter`."""
    ends = [close, *([] if raw else [f"(?={mark})" for mark in (call, marks.get("end")) if mark])]
    splitter = Splitter(call, "|".join(filter(None, ends)), **marks)
    opening = re.compile(f"(?:{call}|{marks['more']}){head}" if "more" in marks else f"(?:{call}){head}")
    closing = re.compile(rf"(?:\s*(?:{close}))?" if optional else rf"\s*(?:{close})" if close else "")

    def parse(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        def calls(start: int) -> Calls | None:
            opened = opening.match(text, start)
            found = read(text, opened.end()) if opened else None
            closed = closing.match(text, found[1]) if found else None
            if opened is None or found is None or closed is None:
                return None
            named = calls_of(opened.groupdict().get("name"), found[0])
            return (named, closed.end()) if named else None

        return splitter.split(text, calls)

    return parse


def calls_of(name: str | None, value: Any) -> list[tuple[str, dict[str, Any]]] | None:
    """Return the calls in a value: arguments of the tool `name`, or calls that name their tools; None if broken."""
    if name is not None:
        arguments = read_arguments(value)
        return None if arguments is None else [(name, arguments)]
    calls = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(body := item.get("function", item) if isinstance(item, dict) else None, dict):
            return None
        named = next((body[key] for key in _NAMES if key in body), None)
        given = next((key for key in _ARGUMENTS if key in body), None)
        arguments = read_arguments(body[given]) if given else None if set(body) - _BESIDES else {}
        if not isinstance(named, str) or not named or arguments is None:
            return None
        calls.append((named, arguments))
    return calls


_PYTHON = re.compile(
    r"""(?P<string>'(?P<single>[^'\\]*(?:\\.[^'\\]*)*)'|"(?P<double>[^"\\]*(?:\\.[^"\\]*)*)")"""
    r"|(?P<call>(?P<name>[^\W\d][\w.-]*)\()|(?P<key>[^\W\d]\w*)\s*=|(?P<other>True|False|None|[\w.+-]+|[\s,:]+)"
    r"|(?P<open>[\[{])|(?P<close>[\]})])",
    re.DOTALL,
)
_GEMMA = re.compile(
    r"""(?P<string><\|"\|>(?P<single>(?P<double>).*?)<\|"\|>)"""
    r"""|(?P<key>[^\s\[\]{}:,<"][^\[\]{}:,<"]*):|(?P<other>[\w.+-]+|[\s,:]+)|(?P<open>[\[{])|(?P<close>[\]}])""",
    re.DOTALL,
)
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_CLOSES = {"[": "]", "{": "}"}
_ESCAPE = re.compile(r"\\(?:x([\da-fA-F]{2})|u([\da-fA-F]{4})|U(000[\da-fA-F]{5}|0010[\da-fA-F]{4})|(.))", re.DOTALL)
_ESCAPES = {**dict(zip("ntrbfav0", "\n\t\r\b\f\a\v\0", strict=True)), "\n": "", "'": "'", '"': '"', "\\": "\\"}


def read_python(text: str, start: int) -> tuple[Any, int] | None:
    """Return the calls that begin at `start`, as `{"name": ..., "arguments": {...}}`, and the position after them."""
    return _read(text, start, _PYTHON, lambda raw: _ESCAPE.sub(_unescaped, raw))


def read_gemma(text: str, start: int) -> tuple[Any, int] | None:
    """Return the value in Gemma's notation that begins at `start`, and the position after it."""
    return _read(text, start, _GEMMA, str)


def _read(text: str, at: int, tokens: re.Pattern[str], unescape: Callable[[str], str]) -> tuple[Any, int] | None:
    out, stack = list[str](), list[tuple[str, str]]()  # per open bracket: its closing text, and the JSON for that
    while token := tokens.match(text, at):
        kind, written = token.lastgroup, token[0]
        at = token.end()
        if kind == "string":
            written = json.dumps(unescape(token["single"] or token["double"] or ""))
        elif kind == "key":
            written = f"{json.dumps(token['key'].strip())}:"
        elif kind == "call":
            if any(closes != "]" for closes, _ in stack) or len(stack) > 1:
                return None
            stack.append((")", "}}"))
            written = f'{{"name":{json.dumps(token["name"])},"arguments":{{'
        elif kind == "open":
            stack.append((_CLOSES[written], _CLOSES[written]))
        elif kind == "close":
            closes, as_json = stack.pop() if stack else ("", "")
            if closes != written:
                return None
            written = as_json
        out.append(_CONSTANTS.get(written, written))
        if not stack:
            break
    found = None if stack else read_json("".join(out), 0)
    return (found[0], at) if found else None


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    return chr(int(code, 16)) if code else _ESCAPES.get(escape[4], escape[0])
