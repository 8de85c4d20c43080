"""Tool calls against the accepted ones: names and arguments, after BFCL's AST check (Patil et al. 2025).

1. All calls of the label must be made and no others; their order is free unless `ordered`. `{"any_of": [...]}` accepts
   one of several labels; an empty list is the right label where no tool should be called.
2. Arguments are equal as JSON: the order of keys is free, 1 equals 1.0, true is not 1, "5" is not 5 (unless `coerce`),
   missing and additional arguments are wrong. Texts are equal after trimming; with `loose_strings` also without regard
   to case, spaces and `,./-_*^`.
3. With `accepted_values` every argument of the label is a list of accepted values; "" among them means that it may be
   left out. `loose_strings` is then on by default, as in BFCL.
4. The calls are those of `metadata["messages"]` after its last user message if the model made any there, else those
   that the response writes (`call_forms`). Calls inside reasoning and tool results do not count.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.reading.call_forms import Broken, Call, call_of, json_or_text, read_calls
from agentrl.rm_hub.reading.call_notations import in_one_notation
from agentrl.rm_hub.reading.common import after_reasoning, bad_label, bad_metadata, clip, flag

_RESULT = re.compile(r"<tool_response>.*?(?:</tool_response>|\Z)", re.DOTALL)
_LOOSE = str.maketrans("", "", " ,./-_*^")
_MAX_DEPTH = 64
_MAX_CALLS = 64


@dataclass(frozen=True, slots=True)
class Rules:
    """How arguments are compared; see the module's second and third points."""

    ordered: bool
    accepted_values: bool
    loose_strings: bool
    coerce: bool


def grade_tool_call(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """1 if exactly the accepted calls are made, else 0; parts give credit for names and arguments.

    Args:
        response: what the model wrote.
        label: `{"name", "arguments"}`, a list of such, or `{"any_of": [...]}`; also as JSON text.
        metadata: the flags `ordered`, `accepted_values`, `loose_strings`, `coerce`; `messages`; `tools` (schemas).

    Raises:
        GraderFailure: of kind "grader_bad_label" or "grader_bad_metadata".
    """
    accepted = flag(metadata, "accepted_values", "tool_call")
    loose = flag(metadata, "loose_strings", "tool_call") if "loose_strings" in metadata else accepted
    rules = Rules(flag(metadata, "ordered", "tool_call"), accepted, loose, flag(metadata, "coerce", "tool_call"))
    wanted = _alternatives(label, rules)
    try:
        made = _made(response, metadata)
    except Broken as error:
        return Grade(0.0, False, None, str(error), {"name": 0.0, "arguments": 0.0})
    grades = [_compare(made, calls, rules) for calls in wanted]
    return max(grades, key=lambda grade: (grade.score, sum(grade.parts.values())))


def _alternatives(label: Any, rules: Rules) -> list[list[Call]]:
    value = json_or_text(label) if isinstance(label, str) else label
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping) and "any_of" in value:
        options = value["any_of"]
        if not isinstance(options, (list, tuple)) or not options:
            raise bad_label("tool_call", "any_of with a list of one or more labels", label)
        return [calls for option in options for calls in _alternatives(option, rules)]
    return [_label_calls(value, label, rules)]


def _label_calls(value: Any, label: Any, rules: Rules) -> list[Call]:
    expected = 'a call {"name": ..., "arguments": {...}}, a list of them, or {"any_of": [...]}'
    try:
        if isinstance(value, str):
            calls: list[Call | None] = [*read_calls(value)] or [None]
        elif isinstance(value, Mapping) and isinstance(value.get("tool_calls"), (list, tuple)):
            calls = [call_of(item) for item in value["tool_calls"]]
        else:
            calls = [call_of(item) for item in (value if isinstance(value, (list, tuple)) else [value])]
    except Broken as error:
        raise bad_label("tool_call", f"{expected} ({error})", label) from None
    known = [call for call in calls if call is not None]
    if len(known) != len(calls) or len(known) > _MAX_CALLS:
        raise bad_label("tool_call", expected, label)
    if rules.accepted_values:
        for call in known:
            if not all(isinstance(values, (list, tuple)) and values for values in call.arguments.values()):
                raise bad_label("tool_call", "a list of accepted values for every argument (accepted_values)", label)
    return known


def _made(response: str, metadata: Mapping[str, Any]) -> list[Call]:
    """The calls that the model made; `Broken` if it said nothing at all."""
    messages = _mappings("messages", metadata.get("messages", ()), "a list of messages")
    calls: list[Call] = []
    for message in messages:
        if message.get("role") == "user":
            calls = []
        elif message.get("role") == "assistant":
            for value in message.get("tool_calls") or ():
                if (call := call_of(value)) is None:
                    raise Broken("a tool call of the messages has no name")
                calls.append(call)
    if calls:
        return calls
    tools = _mappings("tools", metadata.get("tools") or (), "a list of tool schemas")
    text = after_reasoning(in_one_notation(_RESULT.sub("", response)))
    if not text:
        raise Broken("the answer is empty")
    return read_calls(text, tools)


def _mappings(field: str, value: Any, expected: str) -> Sequence[Mapping[str, Any]]:
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, Mapping) for one in value):
        return value
    raise bad_metadata("tool_call", field, expected, value)


def _compare(made: list[Call], wanted: list[Call], rules: Rules) -> Grade:
    shown = clip("; ".join(f"{call.name}({', '.join(map(str, call.arguments))})" for call in made[:_MAX_CALLS]))
    if not made or not wanted:
        right = not made and not wanted
        reason = "no call, as expected" if right else "no tool is called" if not made else "no tool should be called"
        return Grade(float(right), right, shown or None, reason, {"name": float(right), "arguments": float(right)})
    most = max(len(made), len(wanted))
    if most > _MAX_CALLS:
        return Grade(0.0, False, shown, f"{len(made)} calls, {len(wanted)} expected", {"name": 0.0, "arguments": 0.0})
    pairs = _pairs(made, wanted, rules)
    named = sum(made[i].name == wanted[j].name for i, j in pairs)
    shares = [_share(made[i], wanted[j], rules) for i, j in pairs]
    parts = {"name": named / most, "arguments": sum(shares) / most}
    right = len(made) == len(wanted) and all(_same(made[i], wanted[j], rules) for i, j in pairs)
    return Grade(float(right), right, shown, "as expected" if right else _fault(made, wanted, pairs, rules), parts)


def _fault(made: list[Call], wanted: list[Call], pairs: list[tuple[int, int]], rules: Rules) -> str:
    if len(made) != len(wanted):
        return f"{len(made)} calls, {len(wanted)} expected"
    i, j = next((i, j) for i, j in pairs if not _same(made[i], wanted[j], rules))
    got, want = made[i], wanted[j]
    if got.name != want.name:
        return f"calls {clip(got.name)}, expected {clip(want.name)}"
    wrong = [key for key in {**want.arguments, **got.arguments} if not _argument(got, want, key, rules)]
    return f"{got.name}: wrong, missing or additional arguments {clip(', '.join(wrong))}"


def _pairs(made: list[Call], wanted: list[Call], rules: Rules) -> list[tuple[int, int]]:
    """Which made call is held against which wanted one: by place, or so that as many as possible are equal."""
    if rules.ordered or len(made) == len(wanted) == 1:
        return list(zip(range(len(made)), range(len(wanted)), strict=False))
    equal = [[_same(call, want, rules) for want in wanted] for call in made]
    holder: dict[int, int] = {}
    for i in range(len(made)):
        _augment(i, equal, holder, set())
    pairs = [(i, j) for j, i in holder.items()]
    left = [i for i in range(len(made)) if i not in holder.values()]
    free = [j for j in range(len(wanted)) if j not in holder]
    for i in left[: len(free)]:
        best = max(free, key=lambda j: (made[i].name == wanted[j].name, _share(made[i], wanted[j], rules)))
        free.remove(best)
        pairs.append((i, best))
    return pairs


def _augment(i: int, equal: list[list[bool]], holder: dict[int, int], seen: set[int]) -> bool:
    """One step of a maximum matching."""
    for j, same in enumerate(equal[i]):
        if same and j not in seen:
            seen.add(j)
            if j not in holder or _augment(holder[j], equal, holder, seen):
                holder[j] = i
                return True
    return False


def _same(got: Call, want: Call, rules: Rules) -> bool:
    keys = {**want.arguments, **got.arguments}
    return got.name == want.name and all(_argument(got, want, key, rules) for key in keys)


def _share(got: Call, want: Call, rules: Rules) -> float:
    """The share of arguments that are right; 0 for another tool."""
    if got.name != want.name:
        return 0.0
    keys = {**want.arguments, **got.arguments}
    return sum(_argument(got, want, key, rules) for key in keys) / len(keys) if keys else 1.0


def _argument(got: Call, want: Call, key: str, rules: Rules) -> bool:
    if rules.accepted_values:
        return _field(got.arguments, want.arguments, key, rules, 0)
    both = key in want.arguments and key in got.arguments
    return both and _equal(got.arguments[key], want.arguments[key], rules, 0)


def _accepts(got: Any, option: Any, rules: Rules, depth: int) -> bool:
    """One accepted value; inside an object each field may again have a list of accepted values."""
    if depth > _MAX_DEPTH:
        return False
    if isinstance(option, Mapping) and isinstance(got, Mapping) and option:
        if not all(isinstance(values, (list, tuple)) for values in option.values()):
            return _equal(got, option, rules, depth)
        fields = {**option, **got}
        return all(_field(got, option, key, rules, depth + 1) for key in fields)
    if isinstance(option, (list, tuple)) and isinstance(got, (list, tuple)):
        both = zip(got, option, strict=False)
        return len(got) == len(option) and all(_accepts(a, b, rules, depth + 1) for a, b in both)
    return _equal(got, option, rules, depth)


def _field(got: Mapping[str, Any], option: Mapping[str, Any], key: str, rules: Rules, depth: int) -> bool:
    """Whether a field has one of its accepted values, among them "" for none."""
    if key not in option or key not in got:
        return key in option and "" in option[key]
    return any(_accepts(got[key], value, rules, depth) for value in option[key])


def _equal(got: Any, want: Any, rules: Rules, depth: int) -> bool:
    if depth > _MAX_DEPTH:
        return False
    if isinstance(got, Mapping) and isinstance(want, Mapping):
        return got.keys() == want.keys() and all(_equal(got[key], want[key], rules, depth + 1) for key in want)
    if isinstance(got, (list, tuple)) and isinstance(want, (list, tuple)):
        both = zip(got, want, strict=False)
        return len(got) == len(want) and all(_equal(a, b, rules, depth + 1) for a, b in both)
    if rules.coerce and isinstance(got, str) != isinstance(want, str):
        got, want = _coerced(got), _coerced(want)
    if isinstance(got, bool) or isinstance(want, bool) or got is None or want is None:
        return got is want
    if isinstance(got, (int, float)) and isinstance(want, (int, float)):
        return got == want or (isinstance(got, float) and abs(got - want) <= 1e-9 * abs(want))
    if isinstance(got, str) and isinstance(want, str):
        return _text(got, rules) == _text(want, rules)
    return False


def _coerced(value: Any) -> Any:
    return json_or_text(value.strip().lower()) if isinstance(value, str) else value


def _text(text: str, rules: Rules) -> str:
    return text.strip().replace("'", '"').lower().translate(_LOOSE) if rules.loose_strings else text.strip()
