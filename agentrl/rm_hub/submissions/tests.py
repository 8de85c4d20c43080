"""Reads the forms in which data sets give tests of code.

Accepted as the label, as the label in JSON text, or as fields of the metadata:

    {"tests": ["assert f(1) == 2", ...]}, a list of such texts, or one text; {"test": "def check(candidate): ...",
        "entry_point": "f"}; MBPP's {"test_list": [...], "test_setup_code": "import math"} (or "test_imports": a list)
    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}: standard input and output
    {"fn_name": "f", "inputs": [[1, 2], ...], "outputs": [3, ...]}: calls of a function, or of class Solution's method;
        an input may also be text with one JSON value per line
    [{"input": ..., "output": ..., "testtype": "stdin" or "functional"}, ...]
    {"input_output": one of these}

`preamble`, beside the tests or in the metadata, has lines to put before the answer."""

import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agentrl.chat.parsers.base import json_or_text
from agentrl.errors import GraderFailure
from agentrl.rm_hub.reading.common import after_reasoning

_FIELDS = ("tests", "test", "test_list", "input_output", "inputs")
_BESIDE = ("outputs", "fn_name", "entry_point", "test_setup_code", "test_imports", "preamble")
_FORMS = 'expected {"tests": [...]}, {"inputs": [...], "outputs": [...]} or {"fn_name", "inputs", "outputs"}'


@dataclass(frozen=True, slots=True)
class Programs:
    """Runs of the whole program: pairs of standard input and expected output."""

    tests: tuple[tuple[str, str], ...]
    preamble: str = ""


@dataclass(frozen=True, slots=True)
class Checks:
    """Tests of a program's definitions: code that must run, and calls (function, arguments, expected value)."""

    tests: tuple[str | tuple[str, tuple[Any, ...], Any], ...]
    entry: str | None = None  # the function to pass to a function `check` of the tests
    preamble: str = ""


def read_tests(label: Any, metadata: Mapping[str, Any]) -> Programs | Checks:
    """Read an item's tests. Raises GraderFailure: tests are missing (`grader_no_label`) or bad (`grader_bad_label`)."""
    if label is None or label == "":
        label = {name: metadata[name] for name in (*_FIELDS, *_BESIDE) if name in metadata}
        if label.keys().isdisjoint(_FIELDS):
            needs = f"--rm-type code needs tests as label or in the metadata; {_FORMS}"
            raise GraderFailure(needs, kind="grader_no_label")
    name = next((metadata[key] for key in ("fn_name", "func_name", "entry_point") if metadata.get(key)), None)
    given = _parsed(label)
    cases = _read(given, name if isinstance(name, str) else None)
    preamble = (given if isinstance(given, Mapping) else {}).get("preamble", metadata.get("preamble")) or ""
    if not isinstance(preamble, str):
        raise _bad(f"preamble is {preamble!r:.60}, expected text")
    if not any(not isinstance(test, str) or test.strip() for test in cases.tests):
        raise _bad("it contains no test")
    return replace(cases, preamble=preamble)


_IMPORTS = (Path(__file__).parent / "leetcode_imports.txt").read_text(encoding="utf-8")
_FUTURE = re.compile(r"(?ms)\A.*^from __future__ import [^\n]*\n")
_SOLUTION = re.compile(r"(?m)^class Solution\b")


def usual_imports(program: str, cases: Checks) -> str:
    """Return LeetCode's imports if a test calls a function by name or the program has a class Solution, else ""."""
    return _IMPORTS if any(not isinstance(test, str) for test in cases.tests) or _SOLUTION.search(program) else ""


def with_preamble(program: str, preamble: str) -> str:
    """Put the tests' preamble before the program, but after its `__future__` imports."""
    head = found.end() if preamble and (found := _FUTURE.match(program)) else 0
    return f"{program[:head]}{preamble.rstrip()}\n{program[head:]}" if preamble else program


def _read(given: Any, name: Any) -> Programs | Checks:
    match given:
        case str():
            return Checks((given,), name)
        case [*items] if all(isinstance(item, str) for item in items):
            return Checks(tuple(items), name)
        case [*items] if all(isinstance(item, Mapping) and "input" in item and "output" in item for item in items):
            called = any(item.get("testtype", item.get("type")) in ("functional", "function_call") for item in items)
            if called and name is None:
                raise _bad("functional tests need fn_name in label or metadata")
            return _pairs([item["input"] for item in items], [item["output"] for item in items], called and name)
        case Mapping():
            return _read_fields(given, given.get("fn_name") or given.get("entry_point") or name)
    raise _bad(f"it is {given!r:.60}")


def _read_fields(given: Mapping[str, Any], name: Any) -> Programs | Checks:
    if not isinstance(name, str | None):
        raise _bad(f"fn_name is {name!r:.60}")
    for key in ("input_output", "tests", "test_list", "test"):
        if key in given:
            return _after(given, _read(_parsed(given[key]), name))
    inputs, outputs = _parsed(given.get("inputs")), _parsed(given.get("outputs"))
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple) or len(inputs) != len(outputs):
        fields = ", ".join(map(str, given)) or "none"
        raise _bad(f"inputs and outputs must be lists of one length; its fields are {fields}")
    return _pairs(inputs, outputs, name)


def _after(given: Mapping[str, Any], cases: Programs | Checks) -> Programs | Checks:
    """Put the setup lines that MBPP gives for all tests before each test."""
    lines = [given.get("test_setup_code") or "", *(given.get("test_imports") or ())]
    if not all(isinstance(line, str) for line in lines):
        raise _bad(f"test_setup_code or test_imports is {lines!r:.60}")
    if isinstance(cases, Programs):
        return cases
    setup = "".join(f"{line}\n" for line in lines if line)
    return replace(cases, tests=tuple(setup + test if isinstance(test, str) else test for test in cases.tests))


def _pairs(inputs: Sequence[Any], outputs: Sequence[Any], name: str | Literal[False] | None) -> Programs | Checks:
    if name:
        return Checks(tuple((name, _arguments(i), o) for i, o in zip(inputs, outputs, strict=True)))
    return Programs(tuple(zip(map(_lines, inputs), map(_lines, outputs), strict=True)))


def _arguments(item: Any) -> tuple[Any, ...]:
    if isinstance(item, str):
        return tuple(json_or_text(line) for line in item.split("\n") if line.strip())
    if isinstance(item, (list, tuple)):
        return tuple(item)
    raise _bad(f"the arguments of a call are {item!r:.60}, expected a list")


def _lines(item: Any) -> str:
    if isinstance(item, (list, tuple)):
        return "\n".join(map(str, item)) + "\n"
    if isinstance(item, (str, int, float)):
        return str(item)
    raise _bad(f"an input or output is {item!r:.60}, expected text")


def _parsed(given: Any) -> Any:
    """Parse JSON text of an object or list; return other values unchanged."""
    return json_or_text(given) if isinstance(given, str) and given.lstrip()[:1] in ("{", "[") else given


def _bad(what: str) -> GraderFailure:
    return GraderFailure(f"--rm-type code cannot use the item's tests: {what}; {_FORMS}", kind="grader_bad_label")


_MAX = 200_000  # only this many last characters are read: the program comes last
_FENCE = re.compile(
    r"(?m)(?P<line>^[ \t]{0,12})?(?P<fence>`{3,}|~{3,})"
    r"(?:[{.]{0,2}(?P<language>[\w+.#-]{1,24})(?(line)[^`\n]*|[^\S\n]{0,8})|[ \t]{0,8}(?P<apart>[\w+.#-]{0,24})[^\S\n]{0,8})(?:\n|\Z)"
)
"""An opening fence: on a line of its own with any text behind the language, or behind prose with the language alone."""
_LINE = re.compile(
    r"(?:def|class|import|from|if|elif|else|for|while|with|try|except|finally|return|print|async|assert|raise|pass|"
    r"break|continue|global|lambda|yield)\b|[@#\])}\"']|[A-Za-z_][\w.\[\], ]{0,80}(?:[+*/%|&^-]|//|\*\*)?=(?!=)|[A-Za-z_][\w.]{0,60}\("
)
_BEGINS = re.compile(r"(?:def|class|import|from|async def|@)\s?\w")
_PYTHON = re.compile(r"(?:py(?:thon)?[\d.]*)?")
_DEFINES = re.compile(r"(?m)^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|^(\w+)[ \t]*=")


def extract_code(answer: str, names: Collection[str] = ()) -> tuple[str | None, str]:
    """Return the program of an answer, or None; and in words where it was found or why not. The last block that defines
    a function or class of `names`, or else sets one, is preferred to a later block, such as an example of use."""
    text = after_reasoning(answer)[-_MAX:]
    blocks = list(_blocks(text))
    python = [b for b in blocks if _PYTHON.fullmatch(b[0])] or [b for b in blocks if b[0] in ("pycon", "text")]
    named = [b for b in python if b[0]] or python
    wanted = set(names)
    defining, setting = (
        [b for b in python if any(m[kind] in wanted for m in _DEFINES.finditer(b[1]))] for kind in (1, 2)
    )
    if chosen := (defining or setting or named)[-1:]:
        program = textwrap.dedent(chosen[0][1]).strip("\n")
        return (program, "the last code block") if program.strip() else (None, "the code block is empty")
    if blocks:
        return None, f"the code block is {blocks[-1][0]}, not Python"
    plain = _unfenced(text)
    return (plain, "the text itself: there is no code block") if plain else (None, "no code found")


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and text of fenced blocks. A shorter inner fence or one of another kind belongs to the block."""
    at = 0
    while opening := _FENCE.search(text, at):
        fence, start = opening["fence"], opening.end()
        places = (r"^[ \t]{0,12}", f"(?<!{fence[0]})")  # a line of its own, or else the end of the last line of code
        forms = (re.compile(rf"(?m){place}{fence[0]}{{{len(fence)},}}[ \t]*$") for place in places)
        closing = next(filter(None, (form.search(text, start) for form in forms)), None)
        yield (
            (opening["language"] or opening["apart"] or "").lower(),
            text[start : closing.start() if closing else None],
        )
        at = closing.end() if closing else len(text)


def _unfenced(text: str) -> str | None:
    """Return the text from the first line that begins a program to the last line of code; None without a program."""
    lines = text.strip("\n").splitlines()
    first = next((at for at, line in enumerate(lines) if _BEGINS.match(line)), None)
    if first is None:
        code = [line for line in lines if line.strip() and line[0] not in " \t"]
        if not all(_LINE.match(line) and not line.rstrip().endswith((".", "?", "!")) for line in code):
            return None
        first = 0
    kept = lines[first:]
    while kept and not (_LINE.match(kept[-1]) or (kept[-1][:1] in " \t" and kept[-1].strip())):
        kept.pop()
    return "\n".join(kept) or None
