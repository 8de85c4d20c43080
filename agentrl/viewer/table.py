"""The table of trajectories: a page of rows from one store or all stores, which filter and sort the rows."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from agentrl.buffer.reader import Filter
from agentrl.buffer.store import TrajectoryRow
from agentrl.files import read_table
from agentrl.viewer.library import Library, Source
from agentrl.viewer.query import NONE, PAGE, RANGES, VALUES, Query, macro

_COLUMNS = [
    (label, column, screens == "wide", of) for label, column, screens, of in read_table(__file__, "columns.tsv")
]
"""Label, column of the store, true if narrow screens hide the column, and the trajectories that have the column."""


Located = tuple[Source, TrajectoryRow]  # a row, and the source that has it


def form(library: Library, query: Query) -> str:
    sources = tuple(library.chosen(query.source))
    choices = _choices(sources, tuple(source.stamp for source in sources))
    return macro("table.html", "form")(query, library.sources, sources, choices, RANGES.items())


@lru_cache(maxsize=8)
def _choices(sources: tuple[Source, ...], stamps: tuple[object, ...]) -> list[tuple[str, str, list[tuple[str, int]]]]:
    """Return column, label and counted values of the filters, read once while the stores are unchanged."""
    kinds = Counter[str]()
    for part in (part for source in sources for part in source.reader.kinds()):
        kinds[f"{part.kind} {part.name}".strip()] += part.trajectories
    found = [("kind", "kind", [*kinds.items()])]
    for field, label in (VALUES | {"tool": "tool"}).items():
        counts = Counter[str]()
        for source in sources:
            counts.update(source.reader.values("tools" if field == "tool" else field))
        if len(counts) > (field != "tool"):
            found.append((field, label, [(value or NONE, count) for value, count in counts.most_common()]))
    return found


def rows(library: Library, query: Query) -> str:
    where, note = search(library, query)
    total = sum(source.reader.count(part) for source, part in where)
    page = min(query.page, pages := max(1, -(-total // PAGE)))
    offset = (page - 1) * PAGE
    found = _read(where, query.order, PAGE, offset)
    agents = any(row.role for _, row in found)
    columns = [column for *column, of in _COLUMNS if agents or of == "all"]
    return macro("table.html", "rows")(query, columns, agents, found, total, offset, page, pages, note)


def search(library: Library, query: Query) -> tuple[list[tuple[Source, Filter]], str]:
    """Return each chosen source with its filter, which has the ids of a search, and a note on the search or the sources."""
    sources = library.chosen(query.source)
    left_out = [source.name for source in library.sources if query.source is None and source not in sources]
    note = f"cannot be opened: {', '.join(left_out)}" if left_out else ""
    if not query.search:
        return [(source, query.filter(None)) for source in sources], note
    where = [(source, query.filter(source.index.find(query.search))) for source in sources]
    return where, next(filter(None, (source.index.note() for source in sources)), note)


def _read(where: Sequence[tuple[Source, Filter]], order: str, limit: int, offset: int) -> list[Located]:
    """Read `limit` rows from position `offset` of the sorted table of all sources."""
    first = offset if len(where) == 1 else 0
    found = [(s, row) for s, part in where for row in s.reader.query(part, order, offset - first + limit, first)]
    if len(where) > 1:
        column, down = order.removeprefix("-"), order.startswith("-")
        missing = [one for one in found if getattr(one[1], column) is None]
        known = [one for one in found if getattr(one[1], column) is not None]
        found = [*sorted(known, key=lambda one: getattr(one[1], column), reverse=down), *missing]
    return found[offset - first :][:limit]


def neighbours(library: Library, query: Query, here: tuple[int, int]) -> tuple[int, Located | None, Located | None]:
    """Return the position of the row `here` (source's number, id) in the whole table, and the rows before and after it."""
    where, _ = search(library, query)
    for reach in (PAGE, 40 * PAGE):  # rows that a run adds move it away from the query's position
        found = _read(where, query.order, 2 * reach, first := max(0, (query.at or 0) - reach))
        places = [(source.number, row.id) for source, row in found]
        if here in places[bool(first) : 2 * reach - 1]:  # both neighbours were read, if they exist
            at = places.index(here)
            return first + at, found[at - 1] if at else None, found[at + 1] if at + 1 < len(found) else None
    return 0, None, None
