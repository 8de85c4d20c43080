"""The SQLite file under the ledger: one writer, full durability, errors in plain words.

1. WAL journal with `synchronous=FULL`: a committed transaction survives a kill and a power cut.
2. One writer: an exclusive `flock` on `<file>.lock`, held while the file is open and released by the kernel if the
   process dies. Readers need no lock.
3. Every statement runs inside `transaction()`: all of it, or none of it. SQLite's errors become `LedgerError`.
4. Group commit: moves that wait while another thread commits share the next transaction, and so its one fsync."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Self

from agentrl.errors import AgentRLError, LedgerError, raised_as
from agentrl.files import replacing

Move = Callable[[sqlite3.Connection], object]
BUSY_SECONDS, LOCKED_SECONDS = 10.0, 300.0
"""Seconds after which a lock of another process is reported, and after which it is an error."""
_log = logging.getLogger(__name__)

SCHEMA_VERSION = 3

_SCHEMA, _RESULTS, _FROM_2, _WRONG = (
    Path(__file__).with_name(f"{name}.sql").read_text(encoding="utf-8")
    for name in ("ledger", "ledger_results", "ledger_from_2", "ledger_wrong")
)
RESTORE = "restore it from a backup, or start the run in a new folder"


class LedgerFile:
    """An open ledger file at `path`; a context manager. Use `transaction()` for every read and write. Raises
    LedgerError: another writer holds the file, it is not a ledger of this layout, or the folder is not writable."""

    def __init__(self, path: str | Path) -> None:
        self.path, self._mutex = Path(path), threading.RLock()
        self._queued, self._committer = deque[tuple[Move, Future[None]]](), ThreadPoolExecutor(1, "ledger")
        self._lock: IO[str] | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _lock_writer(self.path)
            if not self.path.exists():
                make_empty(self.path)
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS)
        except (OSError, sqlite3.Error) as error:
            self._unlock()
            said = f"ledger {self.path} cannot be opened: {error}"
            raise LedgerError(f"{said}; check that the folder exists, is writable and has space") from error
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        with self.guard():
            self._db.execute(f"PRAGMA busy_timeout={int(BUSY_SECONDS * 1000)}")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
        with self.transaction() as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type='table'")}
            if not {"meta", "groups", "starts", "payloads", "events"} <= tables:
                raise LedgerError(f"{self.path} is a database but not a ledger; give the ledger a file of its own")
            (version,) = db.execute("SELECT max(value) FROM meta WHERE key='schema'").fetchone()
            if version == "2":
                for statement in _FROM_2.split(";"):
                    db.execute(statement)
            elif version != str(SCHEMA_VERSION):
                reads = f"this program reads layout {SCHEMA_VERSION}"
                raise LedgerError(f"ledger {self.path} has layout {version}; {reads}")
            db.execute(_RESULTS)
            (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
            wrong = found if found != "ok" else ", ".join(what for (what,) in db.execute(_WRONG))
        if wrong:
            raise LedgerError(f"ledger {self.path} is damaged: {wrong}; {RESTORE}")

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn SQLite's errors into `LedgerError` with a remedy."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            text = str(error)
            if "full" in text:
                remedy = "the disk is full: free space and resume; nothing that was committed is lost"
            elif "readonly" in text or "unable to open" in text or "disk I/O" in text:
                remedy = "check that the file and its folder are writable and the disk is healthy, then resume"
            elif "not a database" in text or "malformed" in text or "decode" in text:
                remedy = f"the file is not a ledger or is damaged: {RESTORE}"
            elif "closed" in text:
                remedy = "it was closed; open it again"
            else:
                remedy = "nothing of this transition was kept"
            raise LedgerError(f"ledger {self.path}: {text}; {remedy}") from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block in one transaction; an exception rolls the transaction back."""
        with self._mutex, self.guard():
            begin(self._db, self.path)
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                # SQLite has already rolled back by itself after some errors, a full disk among them.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def commit(self, move: Move) -> None:
        """Make a move; return when it is durable. It shares a transaction with all moves that other threads queue before
        the file is free. An AgentRLError that `move` raises undoes this move alone, and is raised here."""
        own: Future[None] = Future()
        self._queued.append((move, own))
        try:
            self._committer.submit(self._commit)
        except RuntimeError as error:
            raise LedgerError(f"ledger {self.path} was closed; open it again") from error
        own.result()

    def _commit(self) -> None:
        refused: dict[Future[None], BaseException] = {}
        with self._mutex:
            queued = [self._queued.popleft() for _ in range(len(self._queued))]
            try:
                if queued:
                    self._make_moves(queued, refused)
            except BaseException as error:  # noqa: BLE001 - raised in each of the threads
                refused = dict.fromkeys((future for _, future in queued), error)
        for _, future in queued:
            if future in refused:
                future.set_exception(refused[future])
            else:
                future.set_result(None)

    def _make_moves(self, queued: list[tuple[Move, Future[None]]], refused: dict[Future[None], BaseException]) -> None:
        with self.transaction() as db:
            for move, future in queued:
                db.execute("SAVEPOINT move")
                try:
                    move(db)
                except AgentRLError as error:
                    refused[future] = error
                    db.execute("ROLLBACK TO move")
                db.execute("RELEASE move")

    def close(self) -> None:
        """Release the file and the writer's lock; closing twice is harmless."""
        self._committer.shutdown()
        with self._mutex, self.guard():
            self._db.close()
        self._unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def begin(db: sqlite3.Connection, path: Path) -> None:
    """Begin a write; wait at most `LOCKED_SECONDS` while another process (a backup, for example) locks the file."""
    began = time.monotonic()
    while True:
        try:
            db.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() - began > LOCKED_SECONDS:
                raise
            _log.warning("another process has locked %s for %.0f s; waiting", path, time.monotonic() - began)


def read_meta(path: Path) -> dict[str, str]:
    """Return the ledger's metadata; empty without a ledger. `checkpoint`: last step that a checkpoint covers, or -1.
    `identity.*`: JSON of the values that map group numbers to prompts. `stored`: number of groups with samples. Raises LedgerError: it cannot be read."""
    if not path.is_file():
        return {}
    with raised_as(LedgerError, f"ledger {path} cannot be read", sqlite3.Error, ValueError, remedy=RESTORE):
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=10.0)) as db:
            found = dict(db.execute("SELECT key, value FROM meta UNION ALL SELECT 'stored', count(*) FROM payloads"))
        int(found.get("checkpoint", -1))
    return found


def make_empty(path: Path) -> None:
    """Create an empty ledger atomically: a file without its tables would count as damaged."""
    with replacing(path) as draft, closing(sqlite3.connect(draft)) as db:
        db.executescript(f"{_SCHEMA} INSERT INTO meta VALUES ('schema', {SCHEMA_VERSION});")


def _lock_writer(path: Path) -> IO[str]:
    # The lock file is never deleted: deleting it would let two writers hold locks on two different files.
    file = path.with_name(path.name + ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        said = f"ledger {path} is in use by another writer (process {holder})"
        raise LedgerError(f"{said}; stop that run, or give this one a folder of its own") from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
