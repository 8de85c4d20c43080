"""Proof from the ledger's history that every group was trained exactly once.

1. The event history of each group is replayed from the start. Every event must begin where the last one ended, and be
   a legal move (or a recovery's). The last must end in the row's present state. A finished group is
   generated again only if it is too old, or if its weights were undone by a resume.
2. A training counts in the surviving history unless a later recovery undid it. Each trained group must have exactly
   one that counts, at the step in its row, and every other group none.
3. For steps up to `through_step`: each was trained, with `groups_per_step` groups if given, and no group in the
   batch of such a step is left untrained.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.buffer.ledger import MOVES, State
from tests.support.ledgers import reading

TOO_OLD = "too old"
"""The reason for which a finished group is generated again, or dropped."""

DEAD = "weights of an earlier process"
"""The reason for which a finished group is generated again if a resume from an older checkpoint changes its weights."""

_RECOVERY_MOVES = {
    (State.LEASED, State.WAITING),
    (State.TRAINED, State.COMPLETED),
    (State.TRAINED, State.WAITING),
    (State.COMPLETED, State.TRAINED),
}


@dataclass(frozen=True, slots=True)
class LedgerAudit:
    """The result of the audit.

    Attributes:
        groups: number of groups ever made.
        events: number of events replayed.
        recoveries: how often the run was resumed.
        states: number of groups by state.
        trained_by_step: number of groups trained at each step of the surviving history.
        undone: trainings that a recovery undid.
        too_old: how often a finished group was made again or dropped as too old.
        dropped_for: number of dropped groups by reason.
        problems: descriptions of what contradicts the contract; empty if the ledger is sound.
    """

    groups: int
    events: int
    recoveries: int
    states: dict[State, int]
    trained_by_step: dict[int, int]
    undone: int
    too_old: int
    dropped_for: dict[str, int]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Return true if there is no problem."""
        return not self.problems


@dataclass(slots=True)
class _History:
    """The events of one group, combined."""

    state: State | None = None
    trained_at: list[int] = field(default_factory=list)
    undone: int = 0
    too_old: int = 0


def audit_ledger(
    path: str | Path,
    *,
    through_step: int | None = None,
    groups_per_step: int | None = None,
    max_staleness: int | None = None,
) -> LedgerAudit:
    """Audit a ledger file; it may be open for writing in another process.

    Args:
        path: the SQLite file.
        through_step: check that every step from 0 to this one was trained; None checks up to the last trained one.
        groups_per_step: number of groups that each step must have trained; None accepts any but zero.
        max_staleness: maximum number of rollouts between a group's own rollout and its training; None accepts
            any.

    Raises:
        sqlite3.Error: there is no such ledger, or it cannot be read.
    """
    with reading(path) as db:
        return _audit(db, through_step, groups_per_step, max_staleness)


def _audit(
    db: sqlite3.Connection, through_step: int | None, groups_per_step: int | None, max_staleness: int | None
) -> LedgerAudit:
    problems: list[str] = []
    histories, events, recoveries = _replay(db, problems)
    rows = db.execute("SELECT group_id, state, train_step, reason FROM groups ORDER BY group_id").fetchall()
    if [row[0] for row in rows] != list(range(len(rows))):
        problems.append("group numbers are not 0, 1, 2, ... without a gap: a row was removed")
    problems += [f"group {i} has events but no row" for i in sorted(set(histories) - {row[0] for row in rows})]
    by_step: Counter[int] = Counter()
    states: Counter[State] = Counter()
    reasons: Counter[str] = Counter()
    for group_id, text, train_step, reason in rows:
        state, history = State(text), histories.get(group_id, _History())
        states[state] += 1
        if history.state is not state:
            problems.append(f"group {group_id} is {state} but its events end at {history.state}")
        if history.trained_at != ([train_step] if state is State.TRAINED else []):
            problems.append(
                f"group {group_id} is {state} with training step {train_step}, "
                f"but its surviving events train it at {history.trained_at}"
            )
        if state is State.TRAINED and train_step is not None:
            by_step[train_step] += 1
        if state is State.DROPPED:
            reasons[reason or "no reason"] += 1
    problems += _missing_payloads(db)
    problems += _check_steps(rows, by_step, through_step, groups_per_step)
    problems += _check_staleness(db, max_staleness)
    return LedgerAudit(
        groups=len(rows),
        events=events,
        recoveries=recoveries,
        states={state: states[state] for state in State},
        trained_by_step=dict(sorted(by_step.items())),
        undone=sum(history.undone for history in histories.values()),
        too_old=sum(history.too_old for history in histories.values()),
        dropped_for=dict(reasons),
        problems=tuple(problems),
    )


def _replay(db: sqlite3.Connection, problems: list[str]) -> tuple[dict[int, _History], int, int]:
    histories: dict[int, _History] = {}
    count = recoveries = 0
    recovering: tuple[int, str] | None = None
    rows = db.execute("SELECT seq, group_id, from_state, to_state, step, run_id, reason FROM events ORDER BY seq")
    for seq, group_id, before, after, step, run_id, reason in rows:
        count += 1
        if count != seq:
            problems.append(f"event {count} is missing: the history has a gap before event {seq}")
            count = seq
        if group_id is None:
            recoveries += 1
            recovering = (step, run_id)
            continue
        history = histories.setdefault(group_id, _History())
        if before != history.state:
            problems.append(f"event {seq}: group {group_id} goes from {before} but was {history.state}")
        old, new = None if before is None else State(before), State(after)
        if not _legal(old, new, recovering is not None and recovering[1] == run_id):
            problems.append(f"event {seq}: group {group_id} may not go from {old} to {new}")
        if old is State.COMPLETED and new in (State.WAITING, State.DROPPED):
            history.too_old += reason == TOO_OLD
            if new is State.WAITING and reason not in (TOO_OLD, DEAD):
                problems.append(f"event {seq}: group {group_id} was finished and is made again for {reason!r}")
        if old is State.TRAINED:
            history.trained_at.clear()
            history.undone += 1
            if recovering is not None and step is not None and step <= recovering[0]:
                problems.append(f"event {seq}: group {group_id} was untrained though the checkpoint covers step {step}")
        if new is State.TRAINED:
            history.trained_at.append(step)
        history.state = new
    return histories, count, recoveries


def _legal(old: State | None, new: State, recovered: bool) -> bool:
    if old is None:
        return new is State.LEASED
    return new in MOVES[old] or (recovered and (old, new) in _RECOVERY_MOVES)


def _missing_payloads(db: sqlite3.Connection) -> list[str]:
    found = db.execute(
        "SELECT group_id FROM groups WHERE state='completed' AND group_id NOT IN (SELECT group_id FROM payloads)"
    )
    return [f"group {group_id} is completed but its samples are gone" for (group_id,) in found]


def _check_staleness(db: sqlite3.Connection, max_staleness: int | None) -> list[str]:
    if max_staleness is None:
        return []
    found = db.execute(
        "SELECT group_id, train_step, version FROM groups WHERE state='trained' AND train_step - version > ?",
        (max_staleness,),
    )
    return [f"group {group_id} was trained at step {at} and leased for {first}" for group_id, at, first in found]


def _check_steps(
    rows: list[tuple[int, str, int | None, str | None]],
    by_step: Counter[int],
    through_step: int | None,
    groups_per_step: int | None,
) -> list[str]:
    last = max(by_step, default=-1) if through_step is None else through_step
    problems = []
    for step in range(last + 1):
        if by_step[step] == 0:
            problems.append(f"step {step} trained no group")
        elif groups_per_step is not None and by_step[step] != groups_per_step:
            problems.append(f"step {step} trained {by_step[step]} groups, expected {groups_per_step}")
    for group_id, state, train_step, _ in rows:
        if state == State.COMPLETED and train_step is not None and train_step <= last and by_step[train_step]:
            problems.append(f"group {group_id} is fixed for step {train_step}, which was trained without it")
    return problems
