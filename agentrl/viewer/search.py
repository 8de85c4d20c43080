"""The text index of a store: it finds the trajectories that contain given words.

1. The first search starts a thread that builds the index. Each later search adds the store's new trajectories. Until
   the thread is done, a search finds the trajectories that are indexed so far.
2. The index is a cache: a file beside the store, or in the user's cache folder if the store's folder is read-only. The
   file may be deleted at any time. It contains words, not texts.
3. A search word matches the beginnings of words, in any order. Case and accents do not matter. Each character of
   Chinese and Japanese is a word."""

import hashlib
import os
import re
import sqlite3
import tempfile
import threading
from contextlib import closing, suppress
from pathlib import Path

from agentrl.buffer.reader import StoreReader
from agentrl.errors import DataError, raised_as
from agentrl.files import stamp

_BATCH, _FORM = 64, 2  # groups of one transaction; a new number has all indexes made anew
_CJK = re.compile("[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]")
_SCHEMA = """
CREATE TABLE state (store TEXT, key INTEGER);
CREATE VIRTUAL TABLE texts USING fts5(text, content='', columnsize=0, detail=none);
"""


class TextIndex:
    """The index of one store; methods may be called from any thread."""

    def __init__(self, store: Path) -> None:
        self._store, self._mutex = store, threading.Lock()
        self._thread = threading.Thread()  # a placeholder that is never started
        self._failed, self._read, self.path = "", tuple[int, ...](), _place(store)

    def find(self, text: str) -> list[int]:
        """Return the ids of indexed trajectories that have all words of `text`, and start to index the others. Raises
        DataError: the index cannot be written or read."""
        self._start()
        words = " ".join(f'"{word}"*' for word in re.findall(r"[^\W_]+", _CJK.sub(r" \g<0> ", text)))
        if not words or not self.path.is_file():
            return []
        what, remedy = f"{self.path}: cannot be searched", "delete it, it is made again"
        with raised_as(DataError, what, sqlite3.Error, OSError, remedy=remedy), closing(self._open()) as db:
            return [found for (found,) in db.execute("SELECT rowid FROM texts WHERE texts MATCH ?", (words,))]

    def wait(self, timeout: float) -> bool:
        """Wait for the running build of the index, at most `timeout` seconds; return true if it has ended."""
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def note(self) -> str:
        """Return a note on search results: a failure or progress of the index; "" if there is none."""
        return self._failed or ("still reading the texts: more may be found" if self._thread.is_alive() else "")

    def _start(self) -> None:
        with self._mutex:
            now = stamp(self._store, self._store.with_name(f"{self._store.name}-wal"))
            if now == self._read and self._failed:
                raise DataError(self._failed)
            if now != self._read and not self._thread.is_alive():
                self._read, self._failed = now, ""
                self._thread = threading.Thread(target=self._build, name="text index", daemon=True)
                self._thread.start()

    def _build(self) -> None:
        try:
            with closing(self._open()) as db, StoreReader(self._store) as reader:
                while self._add(db, reader):
                    pass
        except (sqlite3.Error, OSError, DataError) as error:
            self._failed = f"the texts cannot be indexed in {self.path}: {error}"

    def _add(self, db: sqlite3.Connection, reader: StoreReader) -> bool:
        """Index more groups; return False if there are none. Processes take turns."""
        identity = f"{self._store.stat().st_ino} {_FORM}"
        with db:
            db.execute("BEGIN IMMEDIATE")
            found = db.execute("SELECT store, key FROM state").fetchone()
            if found is None or found[0] != identity:  # another store, or an index of another form
                db.execute("INSERT INTO texts(texts) VALUES ('delete-all')")
                found = (identity, 0)
            rows, last = reader.texts(found[1], _BATCH)
            apart = [(number, _CJK.sub(r" \g<0> ", said)) for number, said in rows]
            db.executemany("INSERT INTO texts(rowid, text) VALUES (?, ?)", apart)
            db.execute("DELETE FROM state")
            db.execute("INSERT INTO state VALUES (?, ?)", (identity, last))
        return bool(last > found[1])

    def _open(self) -> sqlite3.Connection:
        if not self.path.exists():
            _make(self.path)
        db = sqlite3.connect(self.path, isolation_level=None, timeout=10.0)
        db.execute("PRAGMA synchronous=NORMAL")
        return db


def _make(path: Path) -> None:
    """Create the file atomically: while SQLite sets a new file's journal mode, other connections fail at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        new = Path(folder) / path.name
        with closing(sqlite3.connect(new)) as db:
            db.execute("PRAGMA journal_mode=WAL")
            db.executescript(_SCHEMA)
        with suppress(FileExistsError):  # another process was faster
            os.link(new, path)


def _place(store: Path) -> Path:
    if os.access(store.parent, os.W_OK):
        return store.with_name(f"{store.stem}.texts.sqlite")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "agentrl" / f"{hashlib.blake2b(bytes(store), digest_size=8).hexdigest()}.texts.sqlite"
