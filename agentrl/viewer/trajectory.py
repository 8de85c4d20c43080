"""The pages of one trajectory, and of several trajectories side by side."""

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from agentrl.buffer.reader import Filter
from agentrl.buffer.store import TrajectoryRow
from agentrl.errors import DataError
from agentrl.observability.selection import read_trajectory
from agentrl.observability.trajectories import Trajectory, id_texts
from agentrl.sample import Sample
from agentrl.viewer.library import Library
from agentrl.viewer.query import Query, macro
from agentrl.viewer.session import ShownSession, session_of
from agentrl.viewer.table import neighbours

Place = tuple[int, int]  # the address of a trajectory: number of its source, and id in the source

BESIDE = 8  # maximum number of trajectories side by side
_MOST = 100_000  # maximum tokens on a page of several trajectories: more make browsers slow
_ABOUT = 20_000


class TrajectoryPage(NamedTuple):
    """The contents of a trajectory's page."""

    href: str
    source: str
    row: TrajectoryRow
    trajectory: Trajectory
    about: str
    session: ShownSession | str


def load(library: Library, here: Place, query: Query) -> TrajectoryPage:
    """Read one trajectory. Raises DataError: the trajectory does not exist (any more). SampleError: it is damaged."""
    source = library.source(here[0])
    if not (found := source.reader.query(Filter({"id": here[1]}))):
        raise DataError(f"{source.name} has trajectory {here[1]} no more: the oldest go first (--keep-trajectories)")
    group, trajectory = read_trajectory(source.reader, row := found[0], source.texts)
    about = _about(group[row.place], source.texts is id_texts and not group[row.place].hosted)
    return TrajectoryPage(_href(query, here), source.name, row, trajectory, about, session_of(group, row.place))


def one(library: Library, here: Place, query: Query) -> str:
    """Return the HTML page of one trajectory; `query` is the query of the table from which it was opened."""
    shown = load(library, here, query)
    source, row = library.source(here[0]), shown.row
    at, before, after = (0, None, None) if query.at is None else neighbours(library, query, (source.number, row.id))
    siblings = [(r, _href(query, (here[0], r.id))) for r in source.reader.query(Filter(keys=[row.key]), "place")]
    columns = sorted((r.id for r, _ in siblings), key=lambda number: number != row.id)  # the open one first
    return macro("page.html", "one")(
        shown,
        query.url("/", at=None),
        before and _href(query, (before[0].number, before[1].id), at=at - 1),
        after and _href(query, (after[0].number, after[1].id), at=at + 1),
        siblings,
        query.url("/side", rows=",".join(f"{here[0]}.{number}" for number in columns)),
        {r.place: href for r, href in siblings},
    )


def beside(library: Library, places: Sequence[Place], query: Query) -> str:
    if not places:
        raise DataError("nothing to compare: open a trajectory and choose `side by side`")
    shown: list[TrajectoryPage] = []
    for place in places[:BESIDE]:
        found = load(library, place, query)
        if shown and sum(one.row.length for one in shown) + found.row.length > _MOST:
            break
        shown.append(found)
    return macro("page.html", "beside")(shown, shown[0].href, len(places) - len(shown))


def read_places(text: str) -> list[Place]:
    """Return the places in a text such as `0.12,0.13,1.5`; other parts are skipped."""
    return [(int(at), int(row)) for at, row in re.findall(r"(?:^|,)(\d{1,9})\.(\d{1,15})(?=,|$)", text, re.ASCII)]


def _href(query: Query, place: Place, **changes: object) -> str:
    return query.url(f"/t/{place[0]}/{place[1]}", rows=None, **changes)


def _about(sample: Sample, without_tokenizer: bool) -> str:
    metadata = {name: value for name, value in sample.metadata.items() if name != "messages"}
    if isinstance(gateway := metadata.get("gateway"), dict):  # the page shows the session separately
        metadata["gateway"] = {name: value for name, value in gateway.items() if name != "session"}
    found = {"label": sample.label, "reward": sample.reward, "metadata": metadata, "weights": sample.weight_versions}
    text = json.dumps(found, indent=2, ensure_ascii=False, default=str)
    note = "The run's model has no tokenizer.json where it was: token ids are shown.\n" if without_tokenizer else ""
    return note + (text if len(text) <= _ABOUT else text[:_ABOUT] + " …")
