"""The table of trajectories: a page of rows out of the store, filtered and sorted there."""

from functools import lru_cache

from agentrl.buffer.reader import Filter, StoreSection
from agentrl.buffer.store import TrajectoryRow
from agentrl.viewer.library import Library, Source
from agentrl.viewer.query import NONE, PAGE, RANGES, VALUES, Query, macro

_COLUMNS = (
    ("step", "step", False),
    ("group", "group_index", False),
    ("reward", "reward", False),
    ("ended", "status", False),
    ("stop", "stop_reason", True),
    ("turns", "turns", False),
    ("tools", "tools", False),
    ("tokens", "length", False),
    ("sampled", "sampled", True),
    ("staleness", "staleness", True),
    ("env seconds", "seconds", True),
    ("stored", "at", True),
)
_OF_AGENTS = (("role", "role", False), ("branch", "branch", True))
"""Label, column of the store, and whether a narrow screen goes without."""


def form(library: Library, query: Query) -> str:
    source = library.source(query.source)
    kinds, choices = _choices(source, source.stamp)
    names = [one.name for one in library.sources]
    return macro("table.html", "form")(query, names, kinds, choices, RANGES.items())


@lru_cache(maxsize=8)
def _choices(
    source: Source, stamp: tuple[int, ...]
) -> tuple[list[StoreSection], list[tuple[str, str, list[tuple[str, int]]]]]:
    """The choices of the filters, counted once as long as the store is as it is: kinds; column, label and values."""
    found = []
    for field, label in (VALUES | {"tool": "tool"}).items():
        counts = source.reader.values("tools" if field == "tool" else field)
        if len(counts) > (field != "tool"):
            found.append((field, label, [(value or NONE, count) for value, count in counts.items()]))
    return source.reader.kinds(), found


def rows(source: Source, query: Query) -> str:
    where, note = search(source, query)
    total = source.reader.count(where)
    pages = max(1, -(-total // PAGE))
    page = min(query.page, pages)
    offset = (page - 1) * PAGE
    found = source.reader.query(where, query.order, PAGE, offset)
    agents = any(row.role for row in found)
    columns = (*_COLUMNS[:2], *(_OF_AGENTS if agents else ()), *_COLUMNS[2:])
    return macro("table.html", "rows")(query, columns, agents, found, total, offset, page, pages, note)


def search(source: Source, query: Query) -> tuple[Filter, str]:
    """The store's filter, with what a search found in it; and what to know about the search."""
    if not query.search:
        return query.filter(None), ""
    found = source.index.find(query.search)
    return query.filter(found), source.index.note()


def neighbours(source: Source, query: Query, at: int) -> tuple[TrajectoryRow | None, TrajectoryRow | None]:
    """The rows before and after position `at` of the whole table."""
    where, _ = search(source, query)
    first = max(0, at - 1)
    found = source.reader.query(where, query.order, at - first + 2, first)
    before = found[0] if at > 0 and found else None
    return before, found[at - first + 1] if len(found) > at - first + 1 else None
