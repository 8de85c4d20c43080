"""Reading and pruning the ledger's rows inside an open transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from agentrl.buffer.codec import decode_group
from agentrl.buffer.states import CompletedGroup, Lease


def read_lease(db: sqlite3.Connection, group_id: int) -> Lease:
    """A leased group as it is handed out."""
    row = db.execute(
        "SELECT epoch, prompt_index, step, attempts, data FROM groups LEFT JOIN starts USING (group_id) "
        "WHERE group_id=?",
        (group_id,),
    ).fetchone()
    epoch, prompt_index, step, attempts, data = row
    return Lease(group_id, epoch, prompt_index, step, attempts, None if data is None else decode_group(data))


def read_completed(db: sqlite3.Connection, where: str, step: int) -> list[CompletedGroup]:
    """Completed groups with their samples, by rollout step and then by completion; `where` has one `?` for `step`."""
    found = db.execute(
        "SELECT group_id, step, data FROM groups JOIN payloads USING (group_id) "
        f"WHERE state='completed' AND {where} ORDER BY step, completed",
        (step,),
    ).fetchall()
    return [CompletedGroup(group_id, at, decode_group(data)) for group_id, at, data in found]


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
