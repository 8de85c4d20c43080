"""The ledger: the durable truth about which prompt group was trained, and when.

1. One row a group: waiting -> leased -> completed -> trained, or dropped with a reason. Other moves raise
   `LedgerError`: training a group twice, training a dropped one, finishing what nobody leased.
2. Every move is one transaction, together with its event (group, from, to, step, version, run, time).
3. `assign_batch` fixes the groups of a training step before it is trained, so that a step that has to be trained again is
   trained on the same samples.
4. `recover` puts the rows back to what a checkpoint of step c proves: trained after c goes back to completed (or, if
   its samples were pruned, waits to be made again, with all that later weights sampled), leased goes back to waiting. The position in the prompt data is the
   number of rows; it is stored nowhere else.
5. `step` is a training step, from 0. A checkpoint of step c covers every group trained at a step <= c. `version` is the
   version of the weights that played a group: the number of rollouts that they were trained on.
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import orjson

from agentrl.buffer.codec import decode_group, encode_group
from agentrl.buffer.sqlite import LedgerFile
from agentrl.buffer.states import (
    MOVES,
    LedgerLease,
    State,
    forget,
    read_checkpoint,
    read_lease,
    select_ids,
    waiting_ids,
    write_checkpoint,
)
from agentrl.errors import LedgerError
from agentrl.groups import Group, Kept
from agentrl.sample import Sample

PlaceOf = Callable[[int], tuple[int, int | None] | None]
"""A new group's number -> epoch and prompt row (None: only its maker knows the prompt); None at the end of the data."""


class Ledger(LedgerFile):
    """The ledger of one run, open for writing. See the module for the contract.

    Methods may be called from any thread; each blocks for the time of one durable write (a few milliseconds).

    Args:
        path: the SQLite file, made with its folder where missing.
        keep: keep the samples of trained groups until a checkpoint covers them, or always.
    """

    def __init__(self, path: str | Path, *, keep: Literal["until_checkpoint", "always"] = "until_checkpoint") -> None:
        super().__init__(path)
        # The name of this process's life in the event history.
        self._run_id = uuid.uuid4().hex[:12]
        self._keep = keep
        with self.transaction() as db:
            (rows,) = db.execute("SELECT count(*) FROM groups").fetchone()
        self._recovered = rows == 0

    def bind(self, identity: Mapping[str, object]) -> None:
        """Remember what the group numbers depend on (rows, seed, shuffle), or check that it is unchanged.

        Raises:
            LedgerError: it changed, so that the same group number would mean another prompt.
        """
        new = {key: orjson.dumps(value).decode() for key, value in identity.items()}
        with self.transaction() as db:
            for key, value in new.items():
                found = db.execute("SELECT value FROM meta WHERE key=?", (f"identity.{key}",)).fetchone()
                if found is None:
                    db.execute("INSERT INTO meta VALUES (?, ?)", (f"identity.{key}", value))
                elif found[0] != value:
                    raise LedgerError(
                        f"ledger {self.path} was made with {key}={found[0]}, this run has {key}={value}; "
                        "resume with the old value, or start in a new folder"
                    )

    # ---- making groups ------------------------------------------------------------------------------------

    def waiting(self) -> list[LedgerLease]:
        """Groups that wait to be leased again, lowest number first."""
        with self.transaction() as db:
            return [read_lease(db, group_id) for group_id in waiting_ids(db)]

    def lease_waiting(self, n: int, version: int, *, choose: Sequence[int] | None = None) -> list[LedgerLease]:
        """Lease up to `n` waiting groups under `version`: the lowest numbers, or the groups of `choose` in its order."""
        with self._write() as db:
            ids = waiting_ids(db, n) if choose is None else choose[:n]
            for group_id in ids:
                self._move(db, group_id, State.LEASED, version=version)
                db.execute("UPDATE groups SET version=?, attempts=attempts+1 WHERE group_id=?", (version, group_id))
            return [read_lease(db, group_id) for group_id in ids]

    def lease_new(self, n: int, version: int, place: PlaceOf) -> list[LedgerLease]:
        """Make and lease the next groups under `version`; fewer than `n` only if the data has ended."""
        with self._write() as db:
            return [read_lease(db, group_id) for group_id in self._create(db, n, version, place)]

    def lease_given(self, groups: Sequence[Group], version: int) -> list[LedgerLease]:
        """Make and lease new groups whose prompts only the caller knows; the samples are stored to start from."""
        with self._write() as db:
            ids = self._create(db, len(groups), version, lambda group_id: (0, None))
            for group_id, samples in zip(ids, groups, strict=True):
                db.execute("INSERT INTO starts VALUES (?, ?)", (group_id, encode_group(samples)))
            return [read_lease(db, group_id) for group_id in ids]

    def _create(self, db: sqlite3.Connection, n: int, version: int, place: PlaceOf) -> list[int]:
        (first,) = db.execute("SELECT coalesce(max(group_id) + 1, 0) FROM groups").fetchone()
        ids: list[int] = []
        for group_id in range(first, first + n):
            if (at := place(group_id)) is None:
                break
            now = time.time()
            db.execute(
                "INSERT INTO groups VALUES (?, ?, ?, 'leased', NULL, ?, NULL, 1, NULL, NULL, ?, ?)",
                (group_id, *at, version, now, now),
            )
            self._event(db, group_id, None, State.LEASED, None, version=version)
            ids.append(group_id)
        return ids

    # ---- moving groups ------------------------------------------------------------------------------------

    def complete(self, group_id: int, samples: Sequence[Sample], data: bytes | None = None) -> None:
        """leased -> completed; the samples are stored in the same transaction, as `data` if they are encoded already.

        Raises:
            SampleError: a sample cannot be stored.
        """
        if not samples:
            raise LedgerError(f"group {group_id} was completed with no samples; drop it with a reason instead")
        data = data or encode_group(samples)
        with self._write() as db:
            seq = self._move(db, group_id, State.COMPLETED)
            tokens = sum(sample.trained_tokens for sample in samples)
            db.execute("UPDATE groups SET completed=?, tokens=? WHERE group_id=?", (seq, tokens, group_id))
            db.execute("INSERT OR REPLACE INTO payloads VALUES (?, ?)", (group_id, data))

    def release(self, group_id: int, reason: str) -> None:
        """leased -> waiting, to be leased again."""
        with self._write() as db:
            self._move(db, group_id, State.WAITING, reason=reason, only=State.LEASED)

    def expire(self, oldest: int, reason: str, *, again: bool) -> dict[int, int]:
        """completed -> waiting (`again`) or dropped: all that were leased under a version before `oldest` and are not fixed.

        Returns:
            The groups, and how many tokens with mask 1 each had.
        """
        with self._write() as db:
            query = "SELECT group_id, tokens FROM groups WHERE state='completed' AND train_step IS NULL AND version < ?"
            found = dict(db.execute(query, (oldest,)).fetchall())
            for group_id in found:
                self._move(db, group_id, State.WAITING if again else State.DROPPED, reason=reason)
            forget(db, found, starts=not again)
        return found

    def drop(self, group_id: int, reason: str) -> None:
        """Anything but trained -> dropped. Lease another group for the step in its stead."""
        with self._write() as db:
            self._move(db, group_id, State.DROPPED, reason=reason)
            db.execute("UPDATE groups SET train_step=NULL WHERE group_id=?", (group_id,))
            forget(db, [group_id])

    # ---- training -----------------------------------------------------------------------------------------

    def assign_batch(self, n: int, step: int) -> list[int]:
        """The groups of training step `step`: fixed at the first call, the same at every later one.

        Groups fixed for this step before are all in it; up to `n` are filled with the groups of the earliest versions
        that are fixed for no step.

        Returns:
            ids by version, then in the order in which they were completed; fewer than `n` when not enough groups
            are completed (then call again later: those returned are fixed already).
        """
        completed = "SELECT group_id FROM groups WHERE state='completed' AND train_step {} ORDER BY version, completed"
        with self._write() as db:
            fixed = select_ids(db, completed.format("= ?"), step)
            free = select_ids(db, completed.format("IS NULL") + " LIMIT ?", max(0, n - len(fixed)))
            db.executemany("UPDATE groups SET train_step=? WHERE group_id=?", [(step, group_id) for group_id in free])
            return select_ids(db, completed.format("= ?"), step)

    def samples(self, group_id: int) -> Group:
        """The stored samples of a finished group.

        Raises:
            LedgerError: it has none: it was not completed, or they were let go.
            SampleError: they are damaged.
        """
        return decode_group(self.encoded(group_id), f"group {group_id} in ledger {self.path}")

    def encoded(self, group_id: int) -> bytes:
        """As `samples`, the bytes that `codec` reads."""
        with self.transaction() as db:
            row = db.execute("SELECT data FROM payloads WHERE group_id=?", (group_id,)).fetchone()
        if row is None:
            raise LedgerError(f"ledger {self.path} keeps no samples of group {group_id}")
        data: bytes = row[0]
        return data

    def mark_trained(self, group_ids: Iterable[int], step: int) -> None:
        """completed -> trained at `step`, all of them or none.

        Raises:
            LedgerError: one is not completed, is fixed for another step, or a checkpoint already covers `step`.
        """
        ids = list(group_ids)
        with self._write() as db:
            if step <= (covered := read_checkpoint(db)):
                raise LedgerError(f"step {step} cannot be trained: the checkpoint of step {covered} already covers it")
            for group_id in ids:
                self._move(db, group_id, State.TRAINED, step=step)
                (fixed,) = db.execute("SELECT train_step FROM groups WHERE group_id=?", (group_id,)).fetchone()
                if fixed not in (None, step):
                    raise LedgerError(f"group {group_id} is fixed for training step {fixed}, not {step}")
                db.execute("UPDATE groups SET train_step=? WHERE group_id=?", (step, group_id))

    def checkpointed(self, step: int) -> None:
        """A durable checkpoint covers every step up to `step`: the samples it makes needless are let go."""
        with self._write() as db:
            write_checkpoint(db, max(step, read_checkpoint(db)))
            if self._keep == "until_checkpoint":
                ids = select_ids(db, "SELECT group_id FROM groups WHERE state='trained' AND train_step<=?", step)
                forget(db, ids, starts=False)

    # ---- resuming -----------------------------------------------------------------------------------------

    def recover(self, checkpoint_step: int | None) -> None:
        """Put the rows back to what the checkpoint proves; call it once after opening the ledger of an earlier life.

        Args:
            checkpoint_step: the last step that the loaded checkpoint covers; None when training starts afresh.

        Raises:
            LedgerError: the checkpoint is of a later step than anything this ledger knows: it is another run's.
        """
        covered = -1 if checkpoint_step is None else checkpoint_step
        with self.transaction() as db:
            rows, last = db.execute("SELECT count(*), coalesce(max(train_step), -1) FROM groups").fetchone()
            if rows and covered > last:
                raise LedgerError(
                    f"the checkpoint is of step {covered} but ledger {self.path} knows steps up to {last} only; "
                    "load this run's own checkpoint, or move the ledger away to start its data afresh"
                )
            self._event(db, None, None, "recover", None, step=covered)
            self._each(db, "state='completed' AND train_step<=?", (covered,), State.TRAINED, "the checkpoint")
            late = "state='trained' AND train_step>? AND group_id {} (SELECT group_id FROM payloads)"
            self._each(db, late.format("IN"), (covered,), State.COMPLETED, "after the checkpoint")
            gone = "SELECT coalesce(min(train_step), ?) FROM groups WHERE " + late.format("NOT IN")
            (first,) = db.execute(gone, (last, covered)).fetchone()
            remade = self._each(db, late.format("NOT IN"), (covered,), State.WAITING, "samples pruned")
            if remade:
                # From that step on the weights become others than those of the earlier life.
                remade += self._each(
                    db, "state='completed' AND version>?", (first,), State.WAITING, "weights of another life"
                )
                db.execute("UPDATE groups SET train_step=NULL WHERE state='completed' AND train_step>?", (first,))
                forget(db, remade, starts=False)
            self._each(db, "state='leased'", (), State.WAITING, "the run stopped")
            db.executemany("UPDATE groups SET train_step=NULL WHERE group_id=?", [(i,) for i in remade])
            write_checkpoint(db, covered)
        self._recovered = True

    def _each(
        self, db: sqlite3.Connection, where: str, values: tuple[object, ...], to: State, reason: str
    ) -> list[int]:
        found = db.execute(f"SELECT group_id, state, train_step FROM groups WHERE {where} ORDER BY group_id", values)
        rows = found.fetchall()
        for group_id, state, step in rows:
            self._event(db, group_id, State(state), to, reason, step=step)
        now = time.time()
        db.executemany("UPDATE groups SET state=?, updated_at=? WHERE group_id=?", [(to, now, row[0]) for row in rows])
        return [row[0] for row in rows]

    # ---- asking -------------------------------------------------------------------------------------------

    def kept(self, step: int) -> Kept:
        """Returns the completed groups that wait to be trained at `step` or later, by version."""
        query = (
            "SELECT version, count(*), coalesce(sum(tokens), 0) FROM groups "
            "WHERE state='completed' AND (train_step IS NULL OR train_step >= ?) GROUP BY version"
        )
        with self.transaction() as db:
            rows = db.execute(query, (step,)).fetchall()
        return Kept(Counter({version: count for version, count, _ in rows}), sum(tokens for *_, tokens in rows))

    def counts(self) -> dict[State, int]:
        """Number of groups by state."""
        with self.transaction() as db:
            found = dict(db.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())
        return {state: int(found.get(state.value, 0)) for state in State}

    def __len__(self) -> int:
        """Number of groups ever made: the position in the prompt data."""
        return sum(self.counts().values())

    # ---- the parts of a transition ------------------------------------------------------------------------

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        if not self._recovered:
            raise LedgerError(
                f"ledger {self.path} holds an earlier run's groups; call recover(checkpoint_step) before using it"
            )
        with self.transaction() as db:
            yield db

    def _move(
        self,
        db: sqlite3.Connection,
        group_id: int,
        to: State,
        *,
        step: int | None = None,
        version: int | None = None,
        reason: str | None = None,
        only: State | None = None,
    ) -> int:
        row = db.execute("SELECT state, version, reason FROM groups WHERE group_id=?", (group_id,)).fetchone()
        if row is None:
            raise LedgerError(f"there is no group {group_id} to make {to}; lease it first")
        state = State(row[0])
        if to not in MOVES[state] or state is not (only or state):
            why = f" ({row[2]})" if row[2] else ""
            allowed = ", ".join(sorted(MOVES[state])) or "nothing else"
            raise LedgerError(f"group {group_id} is {state}{why} and cannot become {to}; it may become {allowed}")
        db.execute(
            "UPDATE groups SET state=?, reason=?, updated_at=? WHERE group_id=?", (to, reason, time.time(), group_id)
        )
        return self._event(db, group_id, state, to, reason, step=step, version=row[1] if version is None else version)

    def _event(
        self,
        db: sqlite3.Connection,
        group_id: int | None,
        before: State | None,
        to: str,
        reason: str | None,
        *,
        step: int | None = None,
        version: int | None = None,
    ) -> int:
        done = db.execute(
            "INSERT INTO events VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)",
            (group_id, before, to, step, self._run_id, time.time(), reason, version),
        )
        assert done.lastrowid is not None
        return done.lastrowid
