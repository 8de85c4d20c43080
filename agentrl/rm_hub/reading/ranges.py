r"""Intervals said by inequalities: `x > 3`, `1 < x \le 2`. Nothing is evaluated."""

import re

from agentrl.rm_hub.reading.shapes import is_symbol

_CHAIN = re.compile(r"(\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|<|>)")
_GROWING, _FALLING = {"<", r"\le"}, {">", r"\ge"}


def interval(text: str) -> str | None:
    r"""The interval that one inequality or chain about one variable describes: 1 < x \le 2, x > 3; None for other texts."""
    parts = [part.strip() for part in _CHAIN.split(text)]
    if len(parts) == 3:
        # x < 3 is a chain from minus infinity, 3 < x one to infinity.
        growing = parts[1] in _GROWING
        if is_symbol(parts[0]) and parts[2]:
            parts = [r"-\infty" if growing else r"\infty", "<" if growing else ">", *parts]
        elif is_symbol(parts[2]) and parts[0]:
            parts = [*parts, "<" if growing else ">", r"\infty" if growing else r"-\infty"]
    if len(parts) != 5 or not is_symbol(parts[2]):
        return None
    low, first, _, second, high = parts
    if {first, second} <= _FALLING:
        low, first, second, high = high, second, first, low
    elif not {first, second} <= _GROWING:
        return None
    return f"{'(' if first in '<>' else '['}{low},{high}{')' if second in '<>' else ']'}"
