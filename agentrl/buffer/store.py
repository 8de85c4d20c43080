"""The trajectory store: the trajectories of a run in one SQLite file, for inspection during and after the run.

1. A group is stored as the bytes of the ledger (`codec`), without routing. Each sample has a row of plain columns to
   filter and sort by. The trainer's numbers for all tokens of a step are one compressed row.
2. One process writes, one transaction per step. Any number of processes read at the same time (WAL). Committed steps
   survive a kill. A power cut may lose the last steps; training does not need this file.
3. `keep_trajectories` limits the number of trajectories. The oldest training groups are deleted first.
4. A step that is written again replaces the old one. A training step also replaces all later steps, because the run has
   resumed before them. Numbers (`id`, `key`) are never used twice."""

from __future__ import annotations

import hashlib
import math
import sqlite3
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from agentrl.buffer.codec import encode_group, split_group
from agentrl.buffer.sqlite import BUSY_SECONDS, begin
from agentrl.errors import DataError, raised_as
from agentrl.groups import Group
from agentrl.sample import Sample, content_text, version_number

Kind = Literal["train", "eval", "rollout"]
LAYOUT = 4  # version of the file's layout, stored as `user_version`


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """A row of the table of trajectories. A column is None if it does not apply or is not known.

    1. The row is the sample at `place` of the group `key`, see `StoreReader.group`. `kind`: `train`, `eval` or `rollout`.
       `name`: the evaluation set's, else "". `step`: number of the training step or rollout; for `eval`, of the rollouts
       before it, or of the `agentrl eval`. `dropped`: why the group was not trained on, or "".
    2. `prompt`: a hash of the prompt. `question`, `answer`: the first words of the prompt's last user message, and of the
       model's last message. `reward`: the number that `--reward-key` picks. `failure`: `<blame>/<kind>`, or "". `tools`:
       names of the called tools, in order of first use. `seconds`: time in tools and environment.
    3. `length`, `response`, `sampled`: numbers of all tokens, of response tokens, and of tokens with mask 1. `oldest`,
       `newest`: first and last weight version of its tokens, if versions are numbers. `staleness`: step - oldest, in
       training.
    4. `role`, `branch`: role of the conversation and reason of the branch, if an agent program played (see
       docs/gateway.md); else ""."""

    id: int
    key: int
    place: int
    kind: str
    name: str
    step: int
    dropped: str
    group_index: int | None
    sample_index: int | None
    prompt: str
    reward: float | None
    status: str
    failure: str
    tools: tuple[str, ...]
    env: str
    turns: int
    length: int
    response: int
    sampled: int
    oldest: int | None
    newest: int | None
    seconds: float
    at: float
    stop_reason: str
    role: str
    branch: str
    question: str
    answer: str
    staleness: int | None


Row = TrajectoryRow  # former name of `TrajectoryRow`, kept for one release


COLUMNS = tuple(field.name for field in fields(TrajectoryRow))
_STORED = ", ".join(COLUMNS[1:-1])
_SCHEMA = Path(__file__).with_name("store.sql").read_text(encoding="utf-8").format(columns=_STORED, layout=LAYOUT)
_INSERT = f"INSERT INTO trajectories ({_STORED}) VALUES ({', '.join('?' * (len(COLUMNS) - 2))})"


class TrajectoryStore(AbstractContextManager["TrajectoryStore"]):
    """The writer of a store. The first write creates the file at `path`. Methods may be called from any thread; each
    blocks for the time of its write. `keep` is the maximum number of trajectories, but the newest step stays whole; 0
    writes no file. `reward_key` picks from dict rewards."""

    def __init__(self, path: Path, keep: int, reward_key: str | None = None) -> None:
        self.path, self.keep, self._reward_key = path, keep, reward_key
        self._db: sqlite3.Connection | None = None
        self._mutex, self._dropped = threading.Lock(), list[_Played]()

    def __exit__(self, *exc: object) -> None:
        if self._db is not None:
            self._db.close()

    def drop(self, group: Sequence[Sample], reason: str) -> None:
        """Record a group that is not trained, for the next `add`. Raises SampleError: a sample cannot be stored."""
        if self.keep and group:
            rows = [_columns(sample, self._reward_key) for sample in group]
            played = _Played(split_group(encode_group(group))[0], rows, reason)
            with self._mutex:
                self._dropped.append(played)

    def add(
        self,
        kind: Kind,
        name: str,
        step: int,
        groups: Iterable[Group],
        *,
        reward_key: str | None = None,
        encoded: Callable[[Group], bytes] = encode_group,
    ) -> None:
        """Write a step's groups. Unless `kind` is `eval`, also write the groups dropped since the last step.
        `reward_key` is by default the store's; `encoded` returns the bytes of a group, if they exist already. Raises
        DataError: the file cannot be written. SampleError: a sample cannot be stored."""
        if not self.keep:
            return
        key = reward_key or self._reward_key
        found = [_Played(split_group(encoded(g))[0], [_columns(s, key) for s in g]) for g in groups if g]
        with self._transaction() as db:
            if kind != "eval":
                found, self._dropped = found + self._dropped, []
            later = "step >= ?" if kind == "train" else "step = ?"
            for table in ("groups", "trajectories"):
                db.execute(f"DELETE FROM {table} WHERE kind=? AND name=? AND {later}", (kind, name, step))
            if kind == "train":
                db.execute("DELETE FROM details WHERE step >= ?", (step,))
            for played in found:
                made = db.execute("INSERT INTO groups VALUES (NULL, ?, ?, ?, ?)", (kind, name, step, played.data))
                about = [(made.lastrowid, at, kind, name, step, played.dropped) for at in range(len(played.samples))]
                db.executemany(_INSERT, [(*who, *what) for who, what in zip(about, played.samples, strict=True)])
            self._trim(db, len(found))

    def add_details(self, step: int, arrays: Mapping[str, NDArray[np.float16]]) -> None:
        """Write the trainer's numbers for the response tokens of training step `step`: float16 [R] by name, in the
        order of the step's groups and samples; NaN for untrained tokens. Raises DataError: the file cannot be written,
        or an array's length is not the step's number of response tokens."""
        if not (self.keep and arrays):
            return
        with self._transaction() as db:
            query = "SELECT key, response FROM trajectories WHERE kind='train' AND step=? AND dropped='' ORDER BY id"
            samples = db.execute(query, (step,)).fetchall()
            size = sum(length for _, length in samples)
            if not samples:
                return  # deleted already: a step has more than `keep` trajectories
            if any(len(array) != size for array in arrays.values()):
                raise DataError(f"{self.path}: step {step} has {size} response tokens, unlike the trainer's arrays")
            header = orjson.dumps({"names": list(arrays), "samples": samples})
            # High bytes, then low bytes: repeated bytes are then adjacent and compress fast.
            raw = [np.ascontiguousarray(a, "<f2").view(np.uint8).reshape(-1, 2).T.tobytes() for a in arrays.values()]
            squeeze = zlib.compressobj(1, strategy=zlib.Z_RLE)
            data = squeeze.compress(b"".join([struct.pack("<I", len(header)), header, *raw])) + squeeze.flush()
            db.execute("INSERT OR REPLACE INTO details VALUES (?, ?)", (step, data))

    def _trim(self, db: sqlite3.Connection, newest: int) -> None:
        """Delete the oldest groups, but not the last `newest` groups, nor the newest training step."""
        (count,) = db.execute("SELECT count(*) FROM trajectories").fetchone()
        if (excess := count - self.keep) <= 0:
            return
        (last,) = db.execute("SELECT max(key) FROM groups").fetchone()
        gone = []
        for which in ("= 'train' AND step < (SELECT max(step) FROM groups WHERE kind='train')", "!= 'train'"):
            below = f"WHERE key <= ? AND kind {which} GROUP BY key ORDER BY key"
            for key, size in db.execute(f"SELECT key, count(*) FROM trajectories {below}", (last - newest,)):
                if excess <= 0:
                    break
                gone.append((key,))
                excess -= size
        for table in ("groups", "trajectories"):
            db.executemany(f"DELETE FROM {table} WHERE key=?", gone)
        db.execute("DELETE FROM details WHERE step NOT IN (SELECT step FROM groups WHERE kind='train')")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        what = f"{self.path}: the trajectories cannot be written"
        remedy = "free space and check that the folder is writable, or write none: --keep-trajectories 0"
        with self._mutex, raised_as(DataError, what, sqlite3.Error, OSError, remedy=remedy):
            db = self._db = self._db or _open_to_write(self.path)
            with db:
                begin(db, self.path)
                yield db


def _open_to_write(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        if not has_tables(db, path):
            db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
    except BaseException:
        db.close()
        raise
    return db


def has_tables(db: sqlite3.Connection, path: Path) -> bool:
    """Return true if an open file is a store, false if it is empty. Raises DataError: it is something else."""
    found = db.execute("PRAGMA user_version").fetchone()[0]
    if found != LAYOUT and (found or db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]):
        raise DataError(f"{path}: expected a trajectory store of layout {LAYOUT}, got {found}; move it away")
    return bool(found)


class _Played(NamedTuple):
    """A group to write: its bytes, the columns of its samples, and the reason if it was dropped."""

    data: bytes
    samples: list[tuple[Any, ...]]
    dropped: str = ""


def _columns(sample: Sample, reward_key: str | None) -> tuple[Any, ...]:
    metadata = sample.metadata
    try:
        text = orjson.dumps(sample.prompt, default=str)
    except TypeError:  # an integer of more than 64 bits
        text = repr(sample.prompt).encode()
    prompt = hashlib.blake2b(text, digest_size=8).hexdigest()
    failure, tools = metadata.get("failure"), dict.fromkeys(called_tools(metadata.get("messages")))
    failed = f"{failure.get('blame')}/{failure.get('kind')}" if isinstance(failure, Mapping) else ""
    called = "\n".join(["", *tools, ""]) if tools else ""
    versions = [n for label in sample.weight_versions if (n := version_number(label)) is not None]
    return (
        *(sample.group_index, sample.index, prompt, _reward(sample, reward_key)),
        *(sample.status.value, failed, called, str(metadata.get("env") or "")),
        *(sample.model_turns, len(sample.tokens), sample.response_length, sample.trained_tokens),
        *(min(versions, default=None), max(versions, default=None)),
        *(sample.non_generation_time, time.time(), sample.stop_reason, *_branch(metadata.get("gateway"))),
        *_exchange(sample.prompt, metadata.get("messages"), sample.response),
    )


def _branch(gateway: Any) -> tuple[str, str]:
    if not isinstance(gateway, Mapping) or not isinstance(reasons := gateway.get("reasons"), list):
        return "", ""
    opened = next((reason for reason in reversed(reasons) if reason != "extend"), "")
    return str(gateway.get("role", ""))[:80], str(opened)[:80]


def _exchange(prompt: Any, messages: Any, response: str) -> tuple[str, str]:
    """Return the first words of the question, and of the answer without the thoughts before it."""
    answer, question = _last(messages, "assistant") if isinstance(messages, list) else response, _last(prompt, "user")
    if not question.strip() and isinstance(messages, list):  # the environment made the prompt
        question = _last(
            [*takewhile(lambda m: not (isinstance(m, dict) and m.get("role") == "assistant"), messages)], "user"
        )
    return first_words(question), first_words(answer.rpartition("</think>")[2].strip() or answer)


def _last(messages: Any, role: str) -> str:
    """Return the text of the role's last message that has text; a prompt may be text itself."""
    if not isinstance(messages, list):
        return str(messages)
    said = (content_text(m.get("content")) for m in reversed(messages) if isinstance(m, dict) and m.get("role") == role)
    return next((text for text in said if text.strip()), "")


def first_words(text: str, most: int = 90) -> str:
    """Return the beginning of a text in one line."""
    line = " ".join(text[: 10 * most].split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _reward(sample: Sample, key: str | None) -> float | None:
    value = sample.reward.get(key) if isinstance(sample.reward, dict) and key else sample.reward
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def called_tools(messages: Any) -> Iterator[str]:
    """Yield the tools that the assistant called, each name in one line. Calls of an unusual form are skipped."""
    for message in messages if isinstance(messages, list) else ():
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                yield " ".join(str(function.get("name")).split())[:80]
