"""Mutated ledgers: changed bytes of the file and of its log, and rows changed or deleted by another program."""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.buffer.ledger import Ledger
from agentrl.groups import Group
from agentrl.sample import Sample
from tests.buffer.make import complete, finished, lease
from tests.fuzz.mutate import few, fuzz, of_bytes

LOG = "ledger.sqlite-wal"
COVERED = 0
"""The step of the checkpoint from which the ledgers are resumed."""
Files = dict[str, bytes]
Found = tuple[bool, int, dict[int, Group]]
ODD: tuple[Any, ...] = (
    None,
    0,
    1,
    -1,
    2**62,
    0.5,
    "",
    "zzz",
    "7",
    b"\xff",
    b"",
    "leased",
    "trained",
    "waiting",
    "\ud800",
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder in memory if the machine has one: disk speed is not tested."""
    import tempfile

    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as made:
        yield Path(made)


def originals(folder: Path) -> tuple[list[Files], int, dict[int, Group]]:
    """Make a ledger with groups in every state, as left by a clean end and by a kill."""
    path = folder / "original" / "ledger.sqlite"
    ledger = Ledger(path)
    complete(ledger, 4, 0)
    ledger.mark_trained(ledger.assign_batch(2, 0), 0)
    ledger.checkpointed(COVERED)
    ledger.assign_batch(2, 1)
    complete(ledger, 20, 1)
    for group_id in lease(ledger, 3, 1)[:2]:
        ledger.release(group_id, "not needed") if group_id % 2 else ledger.drop(group_id, "no use")
    ledger.lease_given([[Sample(prompt="a"), Sample(prompt="b")]], 1)
    killed = {
        file.name: file.read_bytes() for file in path.parent.iterdir() if not file.name.endswith((".lock", "-shm"))
    }
    made, kept = len(ledger), {i: finished(i) for i in range(2, 24)}
    ledger.close()
    return [killed, {path.name: path.read_bytes()}], made, kept


def damaged(rng: random.Random, files: Files, scratch: Path) -> Files:
    files = dict(files)
    name = rng.choice(sorted(files))
    match rng.randrange(4):
        case 0:
            files[name] = of_bytes(rng, files[name])
        case 1 | 2:
            raw = bytearray(files[name])
            for _ in range(rng.randint(1, 8)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            files[name] = bytes(raw)
        case _:
            return edited(rng, files, scratch)
    return files


def edited(rng: random.Random, files: Files, scratch: Path) -> Files:
    """Return the ledger with one to three cells changed or rows deleted."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for name, raw in files.items():
        (scratch / name).write_bytes(raw)
    with contextlib.closing(sqlite3.connect(scratch / "ledger.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA synchronous=OFF")
        for _ in range(rng.randint(1, 3)):
            table = rng.choice(("meta", "groups", "starts", "payloads", "events"))
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            row = f"{columns[0]} IN (SELECT {columns[0]} FROM {table} LIMIT 1 OFFSET {rng.randrange(26)})"
            with contextlib.suppress(sqlite3.Error, UnicodeEncodeError, OverflowError):
                if rng.random() < 0.4:
                    db.execute(f"DELETE FROM {table} WHERE {row}")
                else:
                    db.execute(f"UPDATE {table} SET {rng.choice(columns)}=? WHERE {row}", (rng.choice(ODD),))
    return {"ledger.sqlite": (scratch / "ledger.sqlite").read_bytes()}


@few
def test_mutated_ledgers(folder: Path, count: int) -> None:
    files, made, kept = originals(folder)
    place = folder / "mutant"

    def read(mutant: Files) -> Found:
        """Read the ledger as a resumed run does."""
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for name, raw in mutant.items():
            (place / name).write_bytes(raw)
        with Ledger(place / "ledger.sqlite") as ledger:
            ledger.recover(COVERED)
            ledger.bind({"prompt_rows": 100})
            groups = len(ledger)
            ledger.lease_waiting(100, 2)
            ledger.lease_new(1, 2, lambda position: (0, position))
            ledger.kept(1)
            batch = ledger.assign_batch(100, 1)
            samples = {group_id: ledger.samples(group_id) for group_id in batch}
            ledger.mark_trained(batch, 1)
            ledger.checkpointed(1)
            ledger.expire(9, "old", again=True)
        logged = mutant.get(LOG, files[0][LOG]) == files[0][LOG]
        return logged, groups, samples

    def sound(found: Found) -> None:
        logged, groups, samples = found
        # If the log is damaged, SQLite returns to the state before the damage, as after a power cut: undetectable.
        assert groups == made or not logged, f"{made - groups} groups are gone without a word"
        assert {i: kept.get(i) for i in samples} == samples, "other samples than were stored"

    assert fuzz(count, lambda rng: damaged(rng, rng.choice(files), folder / "scratch"), read, sound)["accepted"]
