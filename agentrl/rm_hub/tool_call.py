"""Compares tool calls with accepted ones: names and arguments, as in BFCL's AST check (Patil et al. 2025).

1. Exactly the label's calls must be made, in any order unless `ordered`. `{"any_of": [...]}` has several labels.
2. Arguments are compared as JSON: 1 equals 1.0, true is not 1, "5" is not 5 unless `coerce`. `loose_strings` ignores
   case, spaces and `,./-_*^`. With `accepted_values` each argument is a list; "" in it makes the argument optional.
3. Calls are read from `metadata["messages"]` after its last user message, else from the response (`reading.calls`)."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from agentrl.chat.parsers.base import json_or_text
from agentrl.rm_hub.grade import Grade, Metadata
from agentrl.rm_hub.reading.calls import Broken, Call, calls_of, read_calls
from agentrl.rm_hub.reading.common import bad_label, clip, flag, mappings

_RESULT = re.compile(
    r"<tool_response>.*?(?:</tool_response>|\Z)|<\|start\|>functions\.[^<]*<\|channel\|>.*?(?:<\|end\|>|\Z)", re.DOTALL
)
_LOOSE = str.maketrans("", "", " ,./-_*^")
_MAX_DEPTH, _MAX_CALLS = 64, 64


class Rules(NamedTuple):
    """The rules of the comparison; see the module's first and second points."""

    ordered: bool
    accepted_values: bool
    loose_strings: bool
    coerce: bool


def grade_tool_call(response: str, label: Any, metadata: Metadata) -> Grade:
    """Grade `tool_call`: 1 if exactly the accepted calls are made, else 0. Parts give credit for names and arguments.
    `label` is `{"name", "arguments"}`, a list of them, `{"any_of": [...]}`, or JSON text. `metadata` may have the flags
    `ordered`, `accepted_values`, `loose_strings`, `coerce`; `messages`; `tools` (schemas)."""
    accepted = flag(metadata, "accepted_values", "tool_call")
    loose = flag(metadata, "loose_strings", "tool_call") if "loose_strings" in metadata else accepted
    rules = Rules(flag(metadata, "ordered", "tool_call"), accepted, loose, flag(metadata, "coerce", "tool_call"))
    wanted = _alternatives(label, rules)
    try:
        made = _made(response, metadata)
    except Broken as error:
        return _grade(False, None, str(error))
    grades = [_compare(made, calls, rules) for calls in wanted]
    return max(grades, key=lambda grade: (grade.score, sum(grade.parts.values())))


def _alternatives(label: Any, rules: Rules) -> list[list[Call]]:
    value = json_or_text(label) if isinstance(label, str) else label
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping) and "any_of" in value:
        if not isinstance(options := value["any_of"], (list, tuple)) or not options:
            raise bad_label("tool_call", "any_of with a list of one or more labels", label)
        return [calls for option in options for calls in _alternatives(option, rules)]
    expected = 'a call {"name": ..., "arguments": {...}}, a list of them, or {"any_of": [...]}'
    try:
        calls = (read_calls(value) or None) if isinstance(value, str) else calls_of(value)
    except Broken as error:
        raise bad_label("tool_call", f"{expected} ({error})", label) from None
    if calls is None or len(calls) > _MAX_CALLS:
        raise bad_label("tool_call", expected, label)
    listed = (isinstance(values, (list, tuple)) and values for call in calls for values in call.arguments.values())
    if rules.accepted_values and not all(listed):
        raise bad_label("tool_call", "a list of accepted values for every argument (accepted_values)", label)
    return [calls]


def _made(response: str, metadata: Metadata) -> list[Call]:
    """Return the calls that the model made. Raises Broken: a call cannot be read, or the text is empty."""
    messages = mappings(metadata.get("messages", ()), "messages", "a list of messages", "tool_call")
    calls: list[Call] = []
    for message in messages:
        if message.get("role") == "user":
            calls = []
        elif message.get("role") == "assistant":
            if (some := calls_of(message.get("tool_calls") or ())) is None:
                raise Broken("a tool call of the messages has no name")
            calls.extend(some)
    if calls:
        return calls
    tools = mappings(metadata.get("tools") or (), "tools", "a list of tool schemas", "tool_call")
    return read_calls(_RESULT.sub("", response), tools)


def _grade(right: bool, shown: str | None, reason: str, name: float = 0.0, arguments: float = 0.0) -> Grade:
    return Grade(float(right), right, shown, reason, {"name": float(name), "arguments": float(arguments)})


def _compare(made: list[Call], wanted: list[Call], rules: Rules) -> Grade:
    shown = clip("; ".join(f"{call.name}({', '.join(map(str, call.arguments))})" for call in made[:_MAX_CALLS]))
    if not made or not wanted:
        right = not made and not wanted
        reason = "no call, as expected" if right else "no tool is called" if not made else "no tool should be called"
        return _grade(right, shown or None, reason, right, right)
    counts = f"{len(made)} calls, {len(wanted)} expected"
    if (most := max(len(made), len(wanted))) > _MAX_CALLS:
        return _grade(False, shown, counts)
    checked = [[_arguments(call, want, rules) for want in wanted] for call in made]
    shares = [[-1.0 if c is None else sum(c.values()) / len(c) if c else 1.0 for c in row] for row in checked]
    pairs = _pairs(shares, rules.ordered)
    faults = (_fault(made[i], wanted[j], checked[i][j]) for i, j in pairs if shares[i][j] < 1)
    fault = counts if len(made) != len(wanted) else next(faults, None)
    parts = [shares[i][j] for i, j in pairs if shares[i][j] >= 0]
    return _grade(fault is None, shown, fault or "as expected", len(parts) / most, sum(parts) / most)


def _fault(got: Call, want: Call, checked: Mapping[str, bool] | None) -> str:
    if checked is None:
        return f"calls {clip(got.name)}, expected {clip(want.name)}"
    wrong = ", ".join(key for key, right in checked.items() if not right)
    return f"{got.name}: wrong, missing or additional arguments {clip(wrong)}"


def _pairs(shares: list[list[float]], ordered: bool) -> list[tuple[int, int]]:
    """Pair made calls with wanted ones: by position, or with the maximum number of equal pairs."""
    made, free = len(shares), list(range(len(shares[0])))
    if ordered:
        return list(zip(range(made), free, strict=False))
    holder: dict[int, int] = {}
    for i in range(made):
        _augment(i, shares, holder, set())
    pairs = [(i, j) for j, i in holder.items()]
    free = [j for j in free if j not in holder]
    for i in [i for i in range(made) if i not in holder.values()][: len(free)]:
        best = max(free, key=lambda j: shares[i][j])
        free.remove(best)
        pairs.append((i, best))
    return pairs


def _augment(i: int, shares: list[list[float]], holder: dict[int, int], seen: set[int]) -> bool:
    """Find an augmenting path from call `i` in the matching of equal calls; return true if one exists."""
    for j, share in enumerate(shares[i]):
        if share == 1 and j not in seen:
            seen.add(j)
            if j not in holder or _augment(holder[j], shares, holder, seen):
                holder[j] = i
                return True
    return False


def _arguments(got: Call, want: Call, rules: Rules) -> dict[str, bool] | None:
    """Return for each argument of the two calls if it is right, by name; None if the tools differ."""
    if got.name != want.name:
        return None
    return {key: _field(got.arguments, want.arguments, key, rules, 0) for key in {**want.arguments, **got.arguments}}


def _field(got: Mapping[str, Any], want: Mapping[str, Any], key: str, rules: Rules, depth: int) -> bool:
    """Return true if a field has the wanted value, or an accepted value; "" among these allows a missing field."""
    if key not in got or key not in want:
        return rules.accepted_values and key in want and "" in want[key]
    options = want[key] if rules.accepted_values else [want[key]]
    return any(_equal(got[key], option, rules, depth) for option in options)


def _equal(got: Any, want: Any, rules: Rules, depth: int) -> bool:
    if depth > _MAX_DEPTH:
        return False
    if isinstance(got, Mapping) and isinstance(want, Mapping):
        # Inside an accepted object each field may again have a list of accepted values.
        if rules.accepted_values and not (want and all(isinstance(one, (list, tuple)) for one in want.values())):
            rules = rules._replace(accepted_values=False)
        return all(_field(got, want, key, rules, depth + 1) for key in {**want, **got})
    if isinstance(got, (list, tuple)) and isinstance(want, (list, tuple)):
        both = zip(got, want, strict=False)
        return len(got) == len(want) and all(_equal(a, b, rules, depth + 1) for a, b in both)
    if rules.coerce and isinstance(got, str) != isinstance(want, str):
        got, want = (json_or_text(v.strip().lower()) if isinstance(v, str) else v for v in (got, want))
    if isinstance(got, bool) or isinstance(want, bool) or got is None or want is None:
        return got is want
    if isinstance(got, (int, float)) and isinstance(want, (int, float)):
        return got == want or (isinstance(got, float) and abs(got - want) <= 1e-9 * abs(want))
    return isinstance(got, str) and isinstance(want, str) and _text(got, rules) == _text(want, rules)


def _text(text: str, rules: Rules) -> str:
    return text.strip().replace("'", '"').lower().translate(_LOOSE) if rules.loose_strings else text.strip()
