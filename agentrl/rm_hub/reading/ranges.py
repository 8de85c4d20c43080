r"""Sets of real numbers said by inequalities: `x > 3`, `1 < x \le 2`, `x \ge 1 and x < 4`, `|x| > 2`, `x > 0, x \ne 1`.

1. `interval(text)` is the interval of one inequality or chain about one variable, as text.
2. `region(text)` also joins several conditions on the same variable, takes points out, and reads all numbers but some.
   Text that is no such description gives None; so do conditions that "or" connects.
3. Ends are compared as numbers; nothing is evaluated that `symbolic.refusal` does not let pass.
"""

import re

from agentrl.rm_hub.reading import numbers, symbolic
from agentrl.rm_hub.reading.shapes import is_symbol

_CHAIN = re.compile(r"(\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|<|>)")
_AND = re.compile(r"(?i),|;|\band\b|\bwith\b|\bbut\b")
_EXCEPT = re.compile(
    r"(?i)^(?:(?:[a-z]\s*\\in\s*)?\\mathbb\s*\{?\s*R\s*\}?\s*(?:\\setminus|\\backslash|-|\\smallsetminus)\s*\\\{(?P<removed>[^{}]{1,60})\\\}"
    r"|(?:[a-z]\s+(?:is|can be)\s+)?(?:the\s+set\s+of\s+)?(?:all|any|every)\s+reals?(?:\s+numbers?)?(?:\s+[a-z])?\s+(?:except|but|other than)(?:\s+for)?\s*(?:[a-z]\s*=\s*)?(?P<but>(?:[^a-z]|\\[a-z]+|\band\b|\bor\b){1,40}))$"
)
_BUILDER = re.compile(
    r"^\\\{\s*(\\?[a-zA-Z]+)\s*(?:\\in\s*(?:\\mathbb\s*\{?\s*R\s*\}?|R)\s*)?(?:\\mid|:|\|)\s*(.{1,150})\\\}$"
)
_POINT = re.compile(r"^(\\?[A-Za-z]+)\s*\\ne\s*(.+)$")
_ABSOLUTE = re.compile(r"^(?:\||\\lvert)\s*(\\?[A-Za-z]+)\s*(?:\||\\rvert)\s*(<|>|\\le|\\ge)\s*([^|<>]+)$")
_SIGNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_Bounds = tuple[str, str, str, str]
_ALL: _Bounds = ("(", r"-\infty", r"\infty", ")")


def interval(text: str) -> str | None:
    r"""The interval that inequalities about one variable describe: 1 < x \le 2, x > 3."""
    found = _bounds(text)
    return None if found is None else "{}{},{}{}".format(*found)


def region(text: str) -> str | None:
    """The union of intervals that several conditions on one variable describe; None if the text is no such thing."""
    text = text.strip()
    if len(text) > 200:
        return None
    if (left_out := _EXCEPT.match(text)) is not None:
        points = left_out.group("removed") or left_out.group("but")
        parts = [point.strip() for point in re.split(r",|\band\b|\bor\b", points)]
        return _without(_ALL, [point for point in parts if point])
    if (absolute := _ABSOLUTE.match(text)) is not None:
        return _absolute(*absolute.groups())
    text = condition.group(2) if (condition := _BUILDER.match(text)) is not None else text
    parts = [part.strip() for part in _AND.split(text) if part.strip()]
    names, bounds, points = set(), [], []
    for part in parts:
        if (apart := _POINT.match(part)) is not None:
            names.add(apart.group(1))
            points.append(apart.group(2))
        elif points and numbers.read(part) is not None:
            points.append(part)
        elif (found := _bounds(part)) is not None:
            names.add(next(piece.strip() for piece in _CHAIN.split(part) if is_symbol(piece)))
            bounds.append(found)
        else:
            return None
    if len(names) != 1 or (len(parts) < 2 and bounds and r"\infty" not in text):
        return None
    whole = _common(bounds)
    return None if whole is None else _without(whole, points) if points else "{}{},{}{}".format(*whole)


def _bounds(text: str) -> _Bounds | None:
    """(opening bracket, low end, high end, closing bracket) of one inequality or chain about one variable."""
    parts = [part.strip() for part in _CHAIN.split(text)]
    if len(parts) == 3:
        left, relation, right = parts
        if is_symbol(right) and not is_symbol(left):
            left, relation, right = right, _SIGNED[relation], left
        if not is_symbol(left) or not right:
            return None
        closed = relation in {r"\le", r"\ge"}
        if relation in {"<", r"\le"}:
            return "(", r"-\infty", right, "]" if closed else ")"
        return "[" if closed else "(", right, r"\infty", ")"
    if len(parts) == 5 and is_symbol(parts[2]):
        low, first, _, second, high = parts
        if {first, second} <= {">", r"\ge"}:
            low, first, second, high = high, _SIGNED[second], _SIGNED[first], low
        if {first, second} <= {"<", r"\le"}:
            return "[" if first != "<" else "(", low, high, "]" if second != "<" else ")"
    return None


def _common(bounds: list[_Bounds]) -> _Bounds | None:
    """What all of at most two bounds allow; None where that is empty, or not known."""
    if len(bounds) < 2:
        return bounds[0] if bounds else _ALL
    first, second = bounds[0], bounds[-1]
    if first[1] == r"-\infty":
        first, second = second, first
    if len(bounds) > 2 or first[2] != r"\infty" or second[1] != r"-\infty":
        return None
    low, high = _value(first[1]), _value(second[2])
    if low is None or high is None or low >= high:
        return None
    return first[0], first[1], second[2], second[3]


def _without(whole: _Bounds, points: list[str]) -> str | None:
    """The interval with some of its points taken out."""
    valued = [(value, point) for point in points if (value := _value(point)) is not None]
    low, high = _value(whole[1]), _value(whole[2])
    if len(valued) != len(points) or not points or low is None or high is None:
        return None
    opening, start = whole[0], whole[1]
    spelled = []
    for value, point in sorted(valued):
        if not low < value < high:
            return None
        spelled.append(f"{opening}{start},{point})")
        opening, start = "(", point
    return r" \cup ".join([*spelled, f"{opening}{start},{whole[2]}{whole[3]}"])


def _absolute(name: str, relation: str, bound: str) -> str | None:
    if not is_symbol(name) or (value := _value(bound)) is None or value <= 0:
        return None
    low = bound[1:] if bound.startswith("-") else f"-{bound}"
    if relation in {"<", r"\le"}:
        return interval(f"{low} {relation} {name} {relation} {bound}")
    closed = relation == r"\ge"
    return rf"(-\infty,{low}{']' if closed else ')'} \cup {'[' if closed else '('}{bound},\infty)"


def _value(text: str) -> float | None:
    text = text.strip()
    if text.lstrip("+") in {r"\infty", r"-\infty"}:
        return float("-inf") if text.startswith("-") else float("inf")
    number = numbers.read(text)
    if number is not None:
        return float(number.value)
    if symbolic.refusal(text) is not None:
        return None
    size = symbolic.magnitude(text)
    return size.real if size is not None and abs(size.imag) < 1e-12 else None
