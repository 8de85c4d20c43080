"""Two notations for values, translated to JSON token by token: Python's and Gemma's.

1. Python: `[name(key="text", other=[1, None])]`, a list of calls or one call; positional arguments are broken.
2. Gemma: `{key:<|"|>text<|"|>,other:[1,null]}`, keys bare, strings between marks and not escaped.
3. The JSON is then read as JSON: what is no value in the notation is none in the end. Nothing is executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from agentrl.chat.parsers.base import read_json

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
    """The calls that begin at `start`, as `{"name": ..., "arguments": {...}}`, and the position behind them."""
    return _read(text, start, _PYTHON, lambda raw: _ESCAPE.sub(_unescaped, raw))


def read_gemma(text: str, start: int) -> tuple[Any, int] | None:
    """The value in Gemma's notation that begins at `start`, and the position behind it."""
    return _read(text, start, _GEMMA, str)


def _read(text: str, at: int, tokens: re.Pattern[str], unescape: Callable[[str], str]) -> tuple[Any, int] | None:
    out, stack = list[str](), list[tuple[str, str]]()  # of each open bracket, what closes it and how that is written
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
