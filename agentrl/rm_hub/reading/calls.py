"""Tool calls of an answer, in the forms that models write. Text that contains a mark of a chat format is read by that
format's parser. Otherwise the forms are: ReAct's `Action:` with `Action Input:`; JSON alone, in a fence or after
`[TOOL_CALLS]` or `<|python_tag|>`; Python calls, which are not executed. An incomplete call in a chat format or ReAct raises `Broken`."""

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentrl.chat.parsers import FAMILIES
from agentrl.chat.parsers.base import read_arguments, read_json
from agentrl.chat.parsers.families import detect_family
from agentrl.chat.parsers.harmony import split_channels
from agentrl.rm_hub.reading.common import after_reasoning, without_control
from agentrl.rm_hub.reading.verdict import objects

_FORMATS = {
    "<function=": "qwen_xml", "<tool_sep>": "hunyuan", "<arg_key>": "glm", "<tool_call>": "hermes", "<invoke name=": "minimax-m2",
    "<｜tool▁call▁begin｜>": "deepseekv3", "<|tool_call_begin|>": "kimi_k2", "[ARGS]": "mistral", "✿FUNCTION✿": "qwen_agent",
}  # fmt: skip
"""Mark to chat format, tried in this order. The first format that yields calls is used."""
_ARGUMENTS = ("arguments", "parameters", "args", "input", "action_input", "kwargs")
_NAMES = ("name", "function", "tool", "action", "tool_name", "function_name")
_TOOL, _NO_TOOLS = re.compile(r"[A-Za-z_][\w.\-]*"), {*_NAMES, *_ARGUMENTS, "answer", "result"}
_WRAPPERS = ("function", "function_call", "tool_call")
_LIST_MARK = re.compile(r"(?i)\A(?:(?:[-*•]|\d{1,2}[.)])\s{1,4}|(?:(?:tool|function) )?(?:call|action):\s)")
_FENCE = re.compile(r"(?s)```[a-zA-Z_]{0,12}[ \t]*\n?(.*?)```")
_INLINE = re.compile(r"`([^`\n]{3,2000})`")
_NAMED = re.compile(r"(?s)<function=([\w.-]+)>\s*(\{.*\})\s*(?:</function>)?\s*")
_PYTHON = re.compile(r"(?s)^\s*(?:[^\W\d]\w*\s?=\s?)?\[?\s*[^\W\d][\w.]*\(.*\)\s*\]?\s*;?\s*$")
_QUOTED = re.compile(r"(?<=\"arguments\": )'(\{[^\n]{0,2000}\})'(?=\s{0,4}\})")
_MARKS = re.compile(
    r"\[/?TOOL_CALLS\]|<\|python_tag\|>|<\|tool_calls?_(?:begin|end)\|>|</?tool_calls?>|</?functioncall>"
)
_LEADING = re.compile(rf"\A(?:\s*(?:{_MARKS.pattern}))*\s*")
_TRAILING = re.compile(rf"(?:{_MARKS.pattern}|\s)+\Z")
_TAIL = 200  # characters at the end of an answer from which marks are removed
_REACT = re.compile(
    r"(?im)^[\s*]{0,4}(?:Action|Tool|Function)(?: name)?[*]{0,2}:[*]{0,2}[ \t]*`?([\w.-]{1,200})`?[ \t]*\n"
    r"[\s*]{0,4}(?:Action Input|Arguments|Parameters|Input)[*]{0,2}:[*]{0,2}\s*(?:```(?:json)?)?\s*"
)
_GAP = re.compile(r"[\s;,]*")
_OPENING = re.compile(r"\[?\{")
_NAME_ONLY = re.compile(r"[^\W\d][\w.-]{0,200}")
_MAX_PYTHON, _MAX_ATTEMPTS = 10_000, 64
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


class Call(NamedTuple):
    """One call: the tool's name and its arguments."""

    name: str
    arguments: Mapping[str, Any]


class Broken(ValueError):
    """The answer is empty, or a call in it cannot be read."""


def read_calls(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[Call]:
    """Return an answer's calls in order. `tools`: schemas with the types of XML arguments. Raises Broken: a bad call or no text."""
    if "<|channel|>" in text:
        return _of_format("gpt-oss", split_channels(text).rest, tools)
    text = after_reasoning(text, control=True)
    for mark, name in _FORMATS.items():
        if mark in text and (calls := _of_format(name, text, tools)):
            return calls
    with_marks = text
    if not (text := without_control(text)):
        raise Broken("the answer is empty")
    if "<functioncall>" in text:
        text = _QUOTED.sub(r"\1", text)
    if actions := list(_REACT.finditer(text))[:_MAX_ATTEMPTS]:
        inputs: list[tuple[Any, int]] = [read_json(text, action.end()) or (None, 0) for action in actions]
        if not all(isinstance(value, dict) for value, _ in inputs):
            raise Broken("the input of an action is not a JSON object")
        return [Call(action[1], value) for action, (value, _) in zip(actions, inputs, strict=True)]
    edged = _LEADING.sub("", text, count=1)
    edged = edged[:-_TAIL] + _TRAILING.sub("", edged[-_TAIL:], count=1)  # marks inside may be part of an argument
    if calls := _written(edged) or _of_format(detect_family(with_marks).name, with_marks, tools):
        return calls
    bare = _MARKS.sub("\n", text).strip()
    for pieces in ([bare], _FENCE.findall(edged), _INLINE.findall(bare)):
        if calls := [call for piece in pieces[:_MAX_ATTEMPTS] for call in _written(piece.strip())]:
            return calls
    lines = (_LIST_MARK.sub("", line.strip(), count=1).strip("` ") for line in bare.splitlines()[-_MAX_ATTEMPTS:])
    embedded = [call for _, value in objects(bare, _OPENING) for call in calls_of(value) or []]
    return embedded or [call for line in lines for call in _python(line)]


def _written(text: str) -> list[Call]:
    """Return the calls of a text that has only calls, in JSON or in Python."""
    return _values(text) or _python(text)


def _of_format(name: str, text: str, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
    """Parse calls with a chat parser. A call that the parser rejects is tried as `<function=...>`, JSON or Python."""
    parsed = FAMILIES[name].parse(text, tools)
    calls = [Call(name, read_arguments(arguments) or {}) for name, arguments in parsed.calls]
    for broken in parsed.broken:
        body = broken.removeprefix("<tool_call>").removesuffix("</tool_call>").strip()
        named = _NAMED.fullmatch(body)
        arguments = read_arguments(named[2]) if named else None
        read = [Call(named[1], arguments)] if named and arguments is not None else _written(body)
        if not read and _NAME_ONLY.fullmatch(body) and broken.endswith("</tool_call>"):
            read = [Call(body, {})]
        if not read:
            raise Broken("a tool call is not complete or not well formed")
        calls.extend(read)
    return calls


def call_of(value: Any) -> Call | None:
    """Return the call that a JSON object describes, or None. Raises Broken: the arguments are not an object."""
    if not isinstance(value, Mapping):
        return None
    value = next((inner for key in _WRAPPERS if _name(inner := value.get(key)) is not None), value)
    name = _name(value)
    key = next((key for key in _ARGUMENTS if key in value), None)
    if name is None:
        match [*value.items()]:
            case [(str(tool), Mapping() as given)] if _TOOL.fullmatch(tool) and tool not in _NO_TOOLS:
                return Call(tool, given)
        return None
    if key is None and set(value) - {*_NAMES, "id", "type"}:
        return None
    arguments = read_arguments(value[key]) if key is not None else {}
    if arguments is None:
        raise Broken(f"the arguments of {name} are not an object")
    return Call(name, arguments) if name else None


def _name(value: Any) -> str | None:
    """Return the name that a JSON object has under a usual key."""
    names = (value.get(key) for key in _NAMES) if isinstance(value, Mapping) else ()
    return next((name for name in names if isinstance(name, str)), None)


def calls_of(value: Any) -> list[Call] | None:
    """Return a JSON value's calls (one, a list or `{"tool_calls": [...]}`); None: an item is no call. Raises Broken."""
    if isinstance(value, Mapping) and isinstance(value.get("tool_calls"), (list, tuple)):
        value = value["tool_calls"]
    items = value if isinstance(value, (list, tuple)) else [value]
    calls = [call for item in items if (call := call_of(item)) is not None]
    return calls if len(calls) == len(items) else None


def _values(text: str) -> list[Call]:
    """Return the calls of a text that has only JSON values; none for other texts."""
    calls: list[Call] = []
    position = 0
    while position < len(text):
        if (found := read_json(text, position)) is None or not (some := calls_of(found[0])):
            return []
        calls += some
        position = gap.end() if (gap := _GAP.match(text, found[1])) else found[1]
    return calls


def _python(text: str) -> list[Call]:
    """Return the calls of a Python expression, or of one expression a line; none for other texts."""
    if len(text) > _MAX_PYTHON or not _PYTHON.match(text):
        return []
    try:
        body = ast.parse(text.strip()).body
        values = [statement.value for statement in body if isinstance(statement, (ast.Expr, ast.Assign))]
        items = [item for node in values for item in (node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node])]
        if len(values) != len(body) or not all(isinstance(item, ast.Call) for item in items):
            return []
        return [_python_call(item) for item in items if isinstance(item, ast.Call) and not _only_shows(item)]
    except Broken:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _only_shows(node: ast.Call) -> bool:
    """Return true for `print(...)` with arguments of which none is a call."""
    shows = isinstance(node.func, ast.Name) and node.func.id == "print"
    return shows and bool(node.args) and not any(isinstance(argument, ast.Call) for argument in node.args)


def _python_call(node: ast.Call) -> Call:
    if not re.fullmatch(r"[^\W\d][\w.]*", name := ast.unparse(node.func)):
        raise Broken("the called function is not a plain name")
    if name == "print" and len(node.args) == 1 and isinstance(node.args[0], ast.Call):
        return _python_call(node.args[0])
    if len(node.args) == 1 and isinstance(node.args[0], ast.Dict) and not node.keywords:
        return Call(name, _literal(node.args[0]))
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise Broken(f"{name} is called with positional arguments; arguments need their names")
    return Call(name, {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords})


class _Constants(ast.NodeTransformer):
    """Reads the constants of JSON (`true`, `null`) as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(_Constants().visit(node))
    except (ValueError, TypeError) as error:
        raise Broken("an argument is not a literal") from error
