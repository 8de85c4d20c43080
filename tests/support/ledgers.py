"""Reading a ledger from another process, also while a run writes to it."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote


@contextmanager
def reading(path: str | Path) -> Iterator[sqlite3.Connection]:
    """Open the file's present state read-only."""
    name = f"file:{quote(str(Path(path).absolute()))}?mode=ro"
    with closing(sqlite3.connect(name, uri=True, isolation_level=None, timeout=10.0)) as db:
        db.execute("BEGIN")
        yield db
