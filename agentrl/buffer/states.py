"""The ledger's vocabulary: a group's states, the legal moves between them, what the ledger hands out, and its queries."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from agentrl.buffer.codec import decode_group
from agentrl.data.order import DataPosition
from agentrl.groups import Group


class State(StrEnum):
    """Where a group is."""

    WAITING = "waiting"
    """Made, given back, and not leased: it is leased again before any new prompt."""
    LEASED = "leased"
    """Handed to the rollout runner."""
    COMPLETED = "completed"
    """Its samples are stored and wait to be trained."""
    TRAINED = "trained"
    """An optimiser step used it."""
    DROPPED = "dropped"
    """It will never be trained; the reason says why."""


MOVES: Mapping[State, frozenset[State]] = {
    State.WAITING: frozenset({State.LEASED, State.DROPPED}),
    State.LEASED: frozenset({State.COMPLETED, State.WAITING, State.DROPPED}),
    State.COMPLETED: frozenset({State.TRAINED, State.DROPPED, State.WAITING}),
    State.TRAINED: frozenset(),
    State.DROPPED: frozenset(),
}
"""The legal moves outside `recover`."""


@dataclass(frozen=True, slots=True)
class LedgerLease:
    """A group to generate: its prompt's place in the data, or None where only its maker knows the prompt.

    `start` holds the samples to start from when they cannot be rebuilt from the prompt's place.
    """

    group_id: int
    place: DataPosition | None
    start: Group | None


def select_ids(db: sqlite3.Connection, query: str, value: int) -> list[int]:
    """What a query of one `?` and one column gives."""
    return [group_id for (group_id,) in db.execute(query, (value,))]


def waiting_ids(db: sqlite3.Connection, n: int = -1) -> list[int]:
    """Groups that wait, lowest number first; all of them where `n` is negative."""
    return select_ids(db, "SELECT group_id FROM groups WHERE state='waiting' ORDER BY group_id LIMIT ?", n)


def read_lease(db: sqlite3.Connection, group_id: int) -> LedgerLease:
    """A group as it is handed out."""
    epoch, prompt_index, data = db.execute(
        "SELECT epoch, prompt_index, data FROM groups LEFT JOIN starts USING (group_id) WHERE group_id=?", (group_id,)
    ).fetchone()
    place = None if prompt_index is None else DataPosition(epoch, prompt_index)
    return LedgerLease(
        group_id, place, None if data is None else decode_group(data, f"the start of group {group_id} in the ledger")
    )


def forget(db: sqlite3.Connection, ids: Iterable[int], *, starts: bool = True) -> None:
    """Let go of stored samples; `starts` also of what a group starts from."""
    rows = [(group_id,) for group_id in ids]
    db.executemany("DELETE FROM payloads WHERE group_id=?", rows)
    if starts:
        db.executemany("DELETE FROM starts WHERE group_id=?", rows)


def read_checkpoint(db: sqlite3.Connection) -> int:
    """The last step that a durable checkpoint covers, or -1."""
    row = db.execute("SELECT value FROM meta WHERE key='checkpoint'").fetchone()
    return -1 if row is None else int(row[0])


def write_checkpoint(db: sqlite3.Connection, step: int) -> None:
    """Record the last step that a durable checkpoint covers."""
    db.execute("INSERT OR REPLACE INTO meta VALUES ('checkpoint', ?)", (str(step),))
