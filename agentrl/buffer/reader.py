"""Reading trajectory stores: from any process, also while the run writes them.

A reader never writes to a store. Each call sees the state that was committed when the call began."""

from __future__ import annotations

import math
import os
import sqlite3
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from agentrl.buffer.codec import decode_group, read_texts
from agentrl.buffer.store import COLUMNS, TrajectoryRow, has_tables
from agentrl.errors import DataError, SampleError, raised_as
from agentrl.groups import Group
from agentrl.runfolder import BELOW, TRAJECTORIES

Range = tuple[float | None, float | None]  # minimum and maximum, inclusive; None: no bound

Details = dict[str, NDArray[np.float16]]
"""The trainer's values for one sample's response tokens, float16 [R] each: `log_probs` (before the step),
`advantages`, and with a critic `values`. NaN for tokens that did not train."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Filter of trajectories; None does not restrict. `equal`: values of columns ("" is one: no failure, not dropped).
    `within`: ranges of columns; rows without a value do not match. `tool`: called at least once. `keys`: these groups.
    `ids`: only these rows."""

    equal: Mapping[str, str | int] = field(default_factory=dict)
    within: Mapping[str, Range] = field(default_factory=dict)
    tool: str | None = None
    keys: Collection[int] | None = None
    ids: Collection[int] | None = None

    def sql(self) -> tuple[str, list[Any]]:
        parts = ["1", *(f"{_known(column)} = ?" for column in self.equal)]
        values: list[Any] = [*self.equal.values()]
        for column, (least, most) in self.within.items():
            parts.append(f"{_known(column)} BETWEEN ? AND ?")
            values += [-math.inf if least is None else least, math.inf if most is None else most]
        if self.tool is not None:
            parts.append("instr(tools, char(10) || ? || char(10))")
            values.append(self.tool)
        for column, chosen in (("key", self.keys), ("id", self.ids)):
            if chosen is not None:
                parts.append(f"{column} IN (SELECT value FROM json_each(?))")
                values.append(orjson.dumps([*chosen]).decode())
        return " AND ".join(parts), values


class StoreSection(NamedTuple):
    """A summary of one kind, or of one evaluation set, in a store."""

    kind: str
    name: str
    trajectories: int
    first: int
    last: int  # the first and the last step


def find_stores(folder: Path) -> dict[str, Path]:
    """Return the stores of a run by their subfolder: "" (training), "rollouts", "evaluation"."""
    files = {below: folder / below / TRAJECTORIES for below in BELOW.values()}
    return {below: file for below, file in files.items() if file.is_file()}


class StoreReader(AbstractContextManager["StoreReader"]):
    """One store, read only; a context manager. Methods may be called from any thread. Raises DataError: the
    file does not exist, is not a trajectory store, or has another layout."""

    def __init__(self, path: Path) -> None:
        self.path, self._mutex = path, threading.Lock()
        if not path.is_file():
            raise DataError(f"{path}: no such file; a run writes it unless --keep-trajectories is 0")
        # Without a writer there is no write-ahead log. SQLite would create one, which a read-only folder does not allow.
        alone = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
        uri = f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if alone else ''}"
        with raised_as(DataError, f"{path}: cannot be read as a trajectory store", sqlite3.Error):
            self._db = sqlite3.connect(uri, uri=True, check_same_thread=False, timeout=10.0)
            has_tables(self._db, path)

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        with self._mutex:
            self._db.close()

    def kinds(self) -> list[StoreSection]:
        """Count groups by kind and evaluation set."""
        query = "SELECT kind, name, count(*), min(step), max(step) FROM trajectories GROUP BY kind, name"
        return [StoreSection(*row) for row in self._all(query)]

    def steps(self, kind: str, name: str = "") -> list[int]:
        """Return the steps of a kind, or of an evaluation set, in order."""
        query = "SELECT DISTINCT step FROM trajectories WHERE kind=? AND name=? ORDER BY step"
        return [step for (step,) in self._all(query, (kind, name))]

    def values(self, column: str) -> dict[str, int]:
        """Count rows by value of a column of few values (`status`, `failure`, `dropped`, `env`, `tools`, `role`, `branch`)."""
        counts = Counter[str]()
        query = f"SELECT {_known(column)}, count(*) FROM trajectories GROUP BY 1 ORDER BY 2 DESC"
        for value, count in self._all(query):
            for one in str(value).split("\n")[1:-1] if column == "tools" else [value]:
                counts[one] += count
        return counts

    def query(
        self, where: Filter = Filter(), order: str = "id", limit: int = -1, offset: int = 0
    ) -> list[TrajectoryRow]:
        """Return the rows that match: at most `limit`, all if it is negative. `order`: a column; "-" before its name:
        descending. Rows without a value come last."""
        condition, values = where.sql()
        column, down = _known(order.removeprefix("-")), "DESC" if order.startswith("-") else "ASC"
        ordered = f"ORDER BY {column} {down} NULLS LAST, id {down}"
        page = f"SELECT id FROM trajectories WHERE {condition} {ordered} LIMIT ? OFFSET ?"  # sorts ids instead of rows
        query = f"SELECT {', '.join(COLUMNS)} FROM trajectories WHERE id IN ({page}) {ordered}"
        found = (dict(zip(COLUMNS, row, strict=True)) for row in self._all(query, (*values, limit, offset)))
        return [TrajectoryRow(**row | {"tools": tuple(str(row["tools"]).split("\n")[1:-1])}) for row in found]

    def count(self, where: Filter = Filter()) -> int:
        condition, values = where.sql()
        return int(self._all(f"SELECT count(*) FROM trajectories WHERE {condition}", values)[0][0])

    def group(self, key: int) -> Group:
        """Return a group's samples, by `place`. Raises DataError: the group is missing. SampleError: it is damaged."""
        if not (found := self._all("SELECT data FROM groups WHERE key=?", (key,))):
            raise DataError(f"{self.path} has no group {key} any more: the oldest go first (--keep-trajectories)")
        return decode_group(found[0][0], f"group {key} in {self.path}")

    def texts(self, after: int, limit: int) -> tuple[list[tuple[int, str]], int]:
        """Read the texts of at most `limit` groups with keys above `after`, in order, for an index. Returns (id, prompt
        and response) of each trajectory, without damaged groups; and the last key that was read."""
        groups = self._all("SELECT key, data FROM groups WHERE key > ? ORDER BY key LIMIT ?", (after, limit))
        found: list[tuple[int, str]] = []
        for key, data in groups:
            try:
                said = read_texts(data)
            except SampleError:
                continue  # reported when the trajectory is opened
            rows = self._all("SELECT id, place FROM trajectories WHERE key=?", (key,))
            found += [(number, said[place]) for number, place in rows if place < len(said)]
        return found, max((key for key, _ in groups), default=after)

    def details(self, key: int) -> list[Details]:
        """Return the trainer's details of each sample of a group; empty if it has not been trained."""
        query = "SELECT details.data FROM details JOIN groups USING (step) WHERE key=? AND kind='train'"
        if not (found := self._all(query, (key,))):
            return []
        what = f"{self.path}: the trainer's figures of group {key} are damaged"
        with raised_as(DataError, what, zlib.error, struct.error, LookupError, TypeError, ValueError):
            return _details(found[0][0], key)

    def _all(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        remedy, damage = "is it damaged, or closed?", (sqlite3.Error, UnicodeDecodeError)
        with raised_as(DataError, f"{self.path}: cannot be read", *damage, remedy=remedy), self._mutex:
            return self._db.execute(query, values).fetchall()


def _known(column: str) -> str:
    if column not in COLUMNS:
        raise DataError(f"a trajectory store has no column {column!r:.80}; it has {', '.join(COLUMNS)}")
    return column


def _details(data: bytes, key: int) -> list[Details]:
    plain = zlib.decompress(data)
    (size,) = struct.unpack_from("<I", plain)
    header = orjson.loads(plain[4 : 4 + size])
    planes = np.frombuffer(plain, np.uint8, offset=4 + size).reshape(len(header["names"]), 2, -1)
    arrays = np.ascontiguousarray(planes.transpose(0, 2, 1)).view("<f2")[..., 0]
    details, at = [], 0
    for owner, length in header["samples"]:
        if owner == key:
            details.append(dict(zip(header["names"], arrays[:, at : at + length], strict=True)))
        at += length
    return details
