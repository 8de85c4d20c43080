"""Filter, order and page of the table, as an address: `/?source=0&status=failed&reward=>0&order=-length&page=2`."""

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar
from urllib.parse import urlencode

from jinja2 import Environment as Jinja

from agentrl.buffer.reader import Filter, Range
from agentrl.errors import DataError
from agentrl.observability.charts import number
from agentrl.observability.report import templates
from agentrl.observability.trajectories import name_hidden

RANGES = {"step": "step", "group_index": "group", "reward": "reward", "length": "length", "staleness": "staleness"}
VALUES = {"status": "status", "stop_reason": "stop reason", "failure": "failure", "dropped": "not trained"}
VALUES |= {"env": "environment", "role": "role", "branch": "branch"}
"""Columns and their names on the page: `RANGES` are filtered by a range, `VALUES` by one of the stored values."""

NONE = "(none)"  # the choice of rows whose value is empty: no failure, no reason, no environment's name

PAGE = 50  # rows of a page

T = TypeVar("T", int, None)


@dataclass(frozen=True)
class Query:
    """The parameters of an address, unparsed. A missing parameter does not filter."""

    given: Mapping[str, str]

    @property
    def source(self) -> int | None:
        """The number of the source; None for all sources."""
        return None if self.given.get("source") == "all" else _whole(self.given.get("source"), 0)

    @property
    def page(self) -> int:
        return max(1, _whole(self.given.get("page"), 1))

    @property
    def order(self) -> str:
        return self.given.get("order") or ("-at" if self.source is None else "-id")

    @property
    def at(self) -> int | None:
        """Position of the opened trajectory in the whole table."""
        return _whole(self.given.get("at"), None)

    @property
    def cleared(self) -> str:
        return Query({}).url(source=self.given.get("source"))

    @property
    def search(self) -> str:
        return self.given.get("search", "")

    def filter(self, ids: list[int] | None) -> Filter:
        """Return the store's filter. `ids`: rows that a search found, or None. Raises DataError: a range is bad."""
        kind, _, name = self.given.get("kind", "").partition(" ")
        equal = {"kind": kind, "name": name} if kind else {}
        equal |= {field: "" if value == NONE else value for field in VALUES if (value := self.given.get(field))}
        within = {field: parse_range(value) for field in RANGES if (value := self.given.get(field))}
        return Filter(equal, within, self.given.get("tool") or None, ids=ids)

    def url(self, path: str = "/", **changes: object) -> str:
        """Return this address with some parameters changed; empty parameters and None are left out."""
        kept = {name: str(value) for name, value in {**self.given, **changes}.items() if value not in (None, "")}
        return f"{path}?{urlencode(kept)}" if kept else path


def parse_range(text: str) -> Range:
    """Read a range in a form like 3, 2..5, 2.., ..5, >0 or <=0.5. Raises DataError: the text has another form."""
    low, dots, high = text.partition("..")
    try:
        if sign := re.match(r"\s*([<>]=?)", text):
            bound = float(text[sign.end() :])
            if not sign[1].endswith("="):
                bound = math.nextafter(bound, math.inf if sign[1] == ">" else -math.inf)
            return (bound, None) if sign[1][0] == ">" else (None, bound)
        if dots and text.strip() != "..":
            return float(low) if low.strip() else None, float(high) if high.strip() else None
        return float(text), float(text)
    except ValueError:
        raise DataError(f"{text!r:.40} is no range: write 3, 2..5, 2.., >0 or <=0.5") from None


def _whole(text: str | None, default: T) -> int | T:
    return int(text) if text and text.isdecimal() and len(text) < 10 else default


@cache
def _templates() -> Jinja:
    jinja = templates("viewer", "observability")
    jinja.filters["figure"] = lambda value: "–" if value is None else number(value)
    jinja.filters["shown"] = name_hidden
    jinja.filters["clock"] = lambda at: time.strftime("%m-%d %H:%M", time.localtime(at))
    return jinja


def macro(template: str, name: str) -> Callable[..., str]:
    found: Callable[..., str] = getattr(_templates().get_template(template).module, name)
    return found
