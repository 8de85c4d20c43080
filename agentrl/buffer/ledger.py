"""The ledger: the durable record of each prompt group's state.

1. Each group has one row: waiting -> leased -> completed -> trained, or dropped with a reason. Other moves raise
   `LedgerError`: for example, to train a group twice, to train a dropped group, or to complete a group without a lease.
2. Every move is one transaction, together with its event (group, from, to, step, version, run, time).
3. `assign_batch` assigns groups to a training step before the step is trained. A step that is repeated after a resume
   therefore trains on the same samples.
4. `recover` resets the rows to a checkpoint of step c. Groups trained after c become completed again, or waiting if
   their samples were pruned. After the first step with pruned samples the weights will differ, so completed groups of
   later versions become waiting, too. Leased groups become waiting.
5. The position in the prompt data is the number of groups; it is stored nowhere else.
6. `step` is a training step, from 0. A checkpoint of step c covers every group trained at a step <= c. `version` is the
   version of the weights under which a group was leased: the number of rollouts that the weights were trained on."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from sqlite3 import Connection
from typing import Literal

import orjson

from agentrl.buffer.codec import decode_group, encode_group
from agentrl.buffer.sqlite import LedgerFile
from agentrl.data.order import DataPosition
from agentrl.errors import LedgerError
from agentrl.groups import Group, Kept
from agentrl.sample import Sample

SUCCESS = 0.5  # least reward of a successful trajectory

_OTHER = "weights of an earlier process"

PlaceOf = Callable[[int], tuple[int, int | None] | None]
"""Number of a new group -> its epoch and prompt row, or None after the end of the data. The row is None if the caller has
the prompt."""


class State(StrEnum):
    """The state of a group."""

    WAITING = "waiting"  # released or reset; it is leased again before any new prompt
    LEASED = "leased"  # handed to the rollout coordinator
    COMPLETED = "completed"  # its samples are stored and wait to be trained
    TRAINED = "trained"  # an optimizer step used it
    DROPPED = "dropped"  # it will never be trained; the reason says why


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
    """A group to generate. `place`: position of its prompt in the data; None if `start` has the caller's samples."""

    group_id: int
    place: DataPosition | None
    start: Group | None


def select_ids(db: Connection, query: str, value: int) -> list[int]:
    """Return the ids that a query with one `?` and one column selects."""
    return [group_id for (group_id,) in db.execute(query, (value,))]


def waiting_ids(db: Connection, n: int = -1) -> list[int]:
    """Return up to `n` waiting groups, lowest number first; all if `n` is negative."""
    return select_ids(db, "SELECT group_id FROM groups WHERE state='waiting' ORDER BY group_id LIMIT ?", n)


def read_lease(db: Connection, group_id: int) -> LedgerLease:
    epoch, prompt_index, data = db.execute(
        "SELECT epoch, prompt_index, data FROM groups LEFT JOIN starts USING (group_id) WHERE group_id=?", (group_id,)
    ).fetchone()
    place = None if prompt_index is None else DataPosition(epoch, prompt_index)
    start = None if data is None else decode_group(data, f"the start of group {group_id} in the ledger")
    return LedgerLease(group_id, place, start)


def forget(db: Connection, ids: Iterable[int], *, starts: bool = True) -> None:
    """Delete the stored samples of these groups; with `starts`, also the samples that they start from."""
    rows = [(group_id,) for group_id in ids]
    db.executemany("DELETE FROM payloads WHERE group_id=?", rows)
    if starts:
        db.executemany("DELETE FROM starts WHERE group_id=?", rows)


def record_result(db: Connection, group_id: int, rewards: Sequence[float]) -> None:
    """Store how many trajectories of a group succeeded, if its prompt is a row of the data and rewards are known."""
    query = """INSERT OR REPLACE INTO results SELECT prompt_index, group_id, version, ?, ? FROM groups
        WHERE group_id=? AND prompt_index IS NOT NULL"""
    if rewards:
        db.execute(query, (sum(reward >= SUCCESS for reward in rewards), len(rewards), group_id))


def read_checkpoint(db: Connection) -> int:
    """Return the last step that a durable checkpoint covers, or -1."""
    return int(db.execute("SELECT ifnull(max(value), -1) FROM meta WHERE key='checkpoint'").fetchone()[0])


def write_checkpoint(db: Connection, step: int) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES ('checkpoint', ?)", (str(step),))


class Ledger(LedgerFile):
    """The ledger of one run, open for writing. See the module for the contract. Methods may be called from any thread;
    each blocks for the time of one durable write (a few milliseconds). Completions of several threads share a write. The
    samples of trained groups are kept until a checkpoint covers them, or always."""

    def __init__(self, path: str | Path, *, keep: Literal["until_checkpoint", "always"] = "until_checkpoint") -> None:
        super().__init__(path)
        self._run_id = uuid.uuid4().hex[:12]  # names this process in the history of events
        self._keep = keep
        with self.transaction() as db:
            (rows,) = db.execute("SELECT count(*) FROM groups").fetchone()
        self._recovered = rows == 0

    def bind(self, identity: Mapping[str, object]) -> None:
        """Store the values that map a group number to a prompt (rows, seed, shuffle), or check that they are unchanged.
        Contents of rows may change before the first group is finished. Raises LedgerError: a value changed, so that a
        group number would mean another prompt."""
        new = {key: orjson.dumps(value).decode() for key, value in identity.items()}
        with self.transaction() as db:
            if read_checkpoint(db) < 0 and not db.execute("SELECT 1 FROM payloads").fetchone():
                db.execute("DELETE FROM meta WHERE key='identity.prompt_digest'")
            for key, value in new.items():
                found = db.execute("SELECT value FROM meta WHERE key=?", (f"identity.{key}",)).fetchone()
                if found is None:
                    db.execute("INSERT INTO meta VALUES (?, ?)", (f"identity.{key}", value))
                elif found[0] != value:
                    said = f"ledger {self.path} was made with {key}={found[0]}, this run has {key}={value}"
                    raise LedgerError(f"{said}; resume with the old value, or start in a new folder")

    def waiting(self) -> list[LedgerLease]:
        """Return the groups that wait to be leased again, lowest number first."""
        with self.transaction() as db:
            return [read_lease(db, group_id) for group_id in waiting_ids(db)]

    def lease_waiting(self, n: int, version: int, *, choose: Sequence[int] | None = None) -> list[LedgerLease]:
        """Lease up to `n` waiting groups under `version`: the lowest numbers, or the first groups of `choose`."""
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
        """Make and lease new groups from the caller's samples, and store these samples."""
        with self._write() as db:
            ids = self._create(db, len(groups), version, lambda group_id: (0, None))
            for group_id, samples in zip(ids, groups, strict=True):
                db.execute("INSERT INTO starts VALUES (?, ?)", (group_id, encode_group(samples)))
            return [read_lease(db, group_id) for group_id in ids]

    def _create(self, db: Connection, n: int, version: int, place: PlaceOf) -> list[int]:
        (first,) = db.execute("SELECT coalesce(max(group_id) + 1, 0) FROM groups").fetchone()
        ids: list[int] = []
        for group_id in range(first, first + n):
            if (at := place(group_id)) is None:
                break
            row = (group_id, *at, version, now := time.time(), now)
            db.execute("INSERT INTO groups VALUES (?, ?, ?, 'leased', NULL, ?, NULL, 1, NULL, NULL, ?, ?)", row)
            self._event(db, group_id, None, State.LEASED, None, version=version)
            ids.append(group_id)
        return ids

    def complete(
        self, group_id: int, samples: Sequence[Sample], data: bytes | None = None, rewards: Sequence[float] = ()
    ) -> None:
        """Move a group: leased -> completed. The same transaction stores the samples and the result (`record_result`).
        `data` is the encoded form of the samples. Raises SampleError: a sample cannot be stored."""
        if not samples:
            raise LedgerError(f"group {group_id} was completed with no samples; drop it with a reason instead")
        data = data or encode_group(samples)
        tokens = sum(sample.trained_tokens for sample in samples)

        def completed(db: Connection) -> None:
            seq = self._move(db, group_id, State.COMPLETED)
            db.execute("UPDATE groups SET completed=?, tokens=? WHERE group_id=?", (seq, tokens, group_id))
            db.execute("INSERT OR REPLACE INTO payloads VALUES (?, ?)", (group_id, data))
            record_result(db, group_id, rewards)

        self._check_recovered()
        self.commit(completed)

    def release(self, group_id: int, reason: str) -> None:
        """Move a group: leased -> waiting, to be leased again."""
        with self._write() as db:
            self._move(db, group_id, State.WAITING, reason=reason, only=State.LEASED)

    def expire(self, oldest: int, reason: str, *, again: bool) -> dict[int, tuple[int, int]]:
        """Move groups: completed -> waiting (with `again`) or dropped. Moves only groups that were leased under a
        version below `oldest` and are assigned to no step. Returns: group -> its version and number of tokens with mask 1."""
        with self._write() as db:
            which = "state='completed' AND train_step IS NULL AND version < ?"
            rows = db.execute(f"SELECT group_id, version, tokens FROM groups WHERE {which}", (oldest,)).fetchall()
            found = {group_id: (version, tokens) for group_id, version, tokens in rows}
            for group_id in found:
                self._move(db, group_id, State.WAITING if again else State.DROPPED, reason=reason)
            forget(db, found, starts=not again)
        return found

    def drop(self, group_id: int, reason: str, rewards: Sequence[float] = ()) -> None:
        """Move a group: waiting, leased or completed -> dropped. The caller leases another group in its place. The same
        transaction stores the result, as `complete` does."""
        with self._write() as db:
            self._move(db, group_id, State.DROPPED, reason=reason)
            db.execute("UPDATE groups SET train_step=NULL WHERE group_id=?", (group_id,))
            forget(db, [group_id])
            record_result(db, group_id, rewards)

    def assign_batch(self, n: int, step: int) -> list[int]:
        """Assign completed groups to training step `step`, up to `n`; return the ids of all groups of the step. Groups that
        earlier calls assigned to the step stay. Missing groups come from the completed groups without a step, lowest
        version first. Ids are in the order of version, then of completion. They are fewer than `n` if not enough groups
        are completed; a later call adds the others."""
        completed = "SELECT group_id FROM groups WHERE state='completed' AND train_step {} ORDER BY version, completed"
        with self._write() as db:
            fixed = select_ids(db, completed.format("= ?"), step)
            free = select_ids(db, completed.format("IS NULL") + " LIMIT ?", max(0, n - len(fixed)))
            db.executemany("UPDATE groups SET train_step=? WHERE group_id=?", [(step, group_id) for group_id in free])
            return select_ids(db, completed.format("= ?"), step)

    def samples(self, group_id: int, *, compact: bool = False) -> Group:
        """Return the stored samples of a group, as `decode_group` does. Raises LedgerError: the group was not completed,
        or its samples were pruned. Raises SampleError: they are damaged."""
        return decode_group(self.encoded(group_id), f"group {group_id} in ledger {self.path}", compact=compact)

    def encoded(self, group_id: int) -> bytes:
        """Return the stored samples as bytes, encoded by `codec`. Raises LedgerError as `samples` does."""
        with self.transaction() as db:
            row = db.execute("SELECT data FROM payloads WHERE group_id=?", (group_id,)).fetchone()
        if row is None:
            raise LedgerError(f"ledger {self.path} keeps no samples of group {group_id}")
        data: bytes = row[0]
        return data

    def handed(self, pending: Collection[int]) -> None:
        """Record that the data source's saved state has all groups completed so far, except the `pending` groups."""
        found = "json_object('last', max(seq), 'pending', json(?)) FROM events"
        with self._write() as db:  # reads `pending` inside: no group may complete in between
            db.execute(f"INSERT OR REPLACE INTO meta SELECT 'handed', {found}", (orjson.dumps(list(pending)).decode(),))

    def not_handed(self) -> list[LedgerLease]:
        """Return completed groups, made from a source's samples, that the last `handed` does not cover."""
        query = """SELECT group_id FROM groups JOIN starts USING (group_id) JOIN payloads USING (group_id) JOIN meta
            ON key='handed' WHERE completed > json_extract(value, '$.last')
            OR group_id IN (SELECT j.value FROM json_each(meta.value, '$.pending') j) ORDER BY completed"""
        with self.transaction() as db:
            return [read_lease(db, group_id) for (group_id,) in db.execute(query).fetchall()]

    def mark_trained(self, group_ids: Iterable[int], step: int) -> None:
        """Move groups: completed -> trained at `step`, all or none. Raises LedgerError: a group is not completed, a group
        belongs to another step, or a checkpoint already covers `step`."""
        ids = list(group_ids)
        with self._write() as db:
            if step <= (covered := read_checkpoint(db)):
                raise LedgerError(f"step {step} cannot be trained: the checkpoint of step {covered} already covers it")
            for group_id in ids:
                self._move(db, group_id, State.TRAINED, step=step)
                (fixed,) = db.execute("SELECT train_step FROM groups WHERE group_id=?", (group_id,)).fetchone()
                if fixed not in (None, step):
                    raise LedgerError(f"group {group_id} is assigned to training step {fixed}, not {step}")
                db.execute("UPDATE groups SET train_step=? WHERE group_id=?", (step, group_id))

    def checkpointed(self, step: int) -> None:
        """Record that a durable checkpoint covers all steps up to `step`. Prune the samples that no resume needs."""
        with self._write() as db:
            write_checkpoint(db, max(step, read_checkpoint(db)))
            if self._keep == "until_checkpoint":
                ids = select_ids(db, "SELECT group_id FROM groups WHERE state='trained' AND train_step<=?", step)
                forget(db, ids, starts=False)

    def recover(self, checkpoint_step: int | None, batch: int | None = None) -> None:
        """Reset the rows to a checkpoint (see the module). Call it once after opening the ledger of an earlier process.
        `checkpoint_step`: last step that the loaded checkpoint covers; None if training starts without a checkpoint.
        `batch`: groups of a step; if it changed, groups of later steps lose their step. Raises
        LedgerError: the checkpoint is newer than every step of this ledger, so it is another run's."""
        covered = -1 if checkpoint_step is None else checkpoint_step
        with self.transaction() as db:
            rows, last = db.execute("SELECT count(*), coalesce(max(train_step), -1) FROM groups").fetchone()
            last = max(last, read_checkpoint(db))  # a branched run begins after a checkpoint of another run
            if rows and covered > last:
                said = f"the checkpoint is of step {covered} but ledger {self.path} knows steps up to {last} only"
                remedy = "load this run's own checkpoint, or move the ledger away to start from the first prompt"
                raise LedgerError(f"{said}; {remedy}")
            self._event(db, None, None, "recover", None, step=covered)
            self._each(db, "state='completed' AND train_step<=?", (covered,), State.TRAINED, "the checkpoint")
            late = "state='trained' AND train_step>? AND group_id {} (SELECT group_id FROM payloads)"
            self._each(db, late.format("IN"), (covered,), State.COMPLETED, "after the checkpoint")
            gone = "SELECT coalesce(min(train_step), ?) FROM groups WHERE " + late.format("NOT IN")
            (first,) = db.execute(gone, (last, covered)).fetchone()
            remade = self._each(db, late.format("NOT IN"), (covered,), State.WAITING, "samples pruned")
            if remade:
                # From step `first` on, the weights differ from the weights that the earlier process trained.
                remade += self._each(db, "state='completed' AND version>?", (first,), State.WAITING, _OTHER)
                db.execute("UPDATE groups SET train_step=NULL WHERE state='completed' AND train_step>?", (first,))
                forget(db, remade, starts=False)
            self._each(db, "state='leased'", (), State.WAITING, "the run stopped")
            db.executemany("UPDATE groups SET train_step=NULL WHERE group_id=?", [(i,) for i in remade])
            if batch is not None:
                (before,) = db.execute(
                    "SELECT coalesce(max(value), ?) FROM meta WHERE key='batch'", (batch,)
                ).fetchone()
                if int(before) != batch:  # from the next step on, the weights differ too
                    later = self._each(db, "state='completed' AND version>?", (covered + 1,), State.WAITING, _OTHER)
                    forget(db, later, starts=False)
                    db.execute("UPDATE groups SET train_step=NULL WHERE state!='trained' AND train_step>?", (covered,))
                db.execute("INSERT OR REPLACE INTO meta VALUES ('batch', ?)", (batch,))
            write_checkpoint(db, covered)
        self._recovered = True

    def _each(self, db: Connection, where: str, values: tuple[object, ...], to: State, reason: str) -> list[int]:
        query = f"SELECT group_id, state, train_step FROM groups WHERE {where} ORDER BY group_id"
        rows = db.execute(query, values).fetchall()
        for group_id, state, step in rows:
            self._event(db, group_id, State(state), to, reason, step=step)
        now = time.time()
        db.executemany("UPDATE groups SET state=?, updated_at=? WHERE group_id=?", [(to, now, row[0]) for row in rows])
        return [row[0] for row in rows]

    def kept(self, step: int) -> Kept:
        """Count the completed groups that wait for training at `step` or later, by version, and their tokens."""
        waits = "state='completed' AND (train_step IS NULL OR train_step >= ?)"
        query = f"SELECT version, count(*), coalesce(sum(tokens), 0) FROM groups WHERE {waits} GROUP BY version"
        with self.transaction() as db:
            rows = db.execute(query, (step,)).fetchall()
        return Kept(Counter({version: count for version, count, _ in rows}), sum(tokens for *_, tokens in rows))

    def results(self, prompts: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """Return (row, version, successes, trials) of each group of these prompt rows that has a result. The
        `place` of `lease_new` may call this method and `busy_prompts`."""
        marks = ", ".join("?" * len(prompts))
        query = f"""SELECT prompt_index, version, successes, trials FROM results
            WHERE prompt_index IN ({marks}) ORDER BY prompt_index, group_id"""
        with self._mutex, self.guard():
            return self._db.execute(query, tuple(prompts)).fetchall()

    def busy_prompts(self, version: int) -> set[int]:
        """Return the prompt rows of the groups that are neither trained nor dropped, or whose version is at least `version`."""
        query = "SELECT prompt_index FROM groups WHERE state IN ('waiting', 'leased', 'completed') OR version >= ?"
        with self._mutex, self.guard():
            return set(select_ids(self._db, query, version))

    def prompts_with_results(self) -> int:
        with self.transaction() as db:
            return int(db.execute("SELECT count(DISTINCT prompt_index) FROM results").fetchone()[0])

    def counts(self) -> dict[State, int]:
        with self.transaction() as db:
            found = dict(db.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())
        return {state: int(found.get(state.value, 0)) for state in State}

    def __len__(self) -> int:
        """Return the number of all groups, which is the position in the prompt data."""
        return sum(self.counts().values())

    def _check_recovered(self) -> None:
        if not self._recovered:
            remedy = "call recover(checkpoint_step) before using it"
            raise LedgerError(f"ledger {self.path} holds an earlier run's groups; {remedy}")

    def _write(self) -> AbstractContextManager[Connection]:
        self._check_recovered()
        return self.transaction()

    def _move(
        self,
        db: Connection,
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
            raise LedgerError(f"group {group_id} does not exist, so it cannot become {to}; lease it first")
        state = State(row[0])
        if to not in MOVES[state] or state is not (only or state):
            why = f" ({row[2]})" if row[2] else ""
            allowed = ", ".join(sorted(MOVES[state] - {to})) or "nothing else"
            raise LedgerError(f"group {group_id} is {state}{why} and cannot become {to}; it may become {allowed}")
        values = (to, reason, time.time(), group_id)
        db.execute("UPDATE groups SET state=?, reason=?, updated_at=? WHERE group_id=?", values)
        return self._event(db, group_id, state, to, reason, step=step, version=row[1] if version is None else version)

    def _event(
        self,
        db: Connection,
        group_id: int | None,
        before: State | None,
        to: str,
        reason: str | None,
        *,
        step: int | None = None,
        version: int | None = None,
    ) -> int:
        row = (group_id, before, to, step, self._run_id, time.time(), reason, version)
        done = db.execute("INSERT INTO events VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        assert done.lastrowid is not None
        return done.lastrowid
