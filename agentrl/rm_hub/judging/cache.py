"""Verdicts in an SQLite file that several processes may share, by a digest of model, rubric and texts. A thread reads
and writes the file. It keeps the rollback journal: SQLite refuses the switch to the write-ahead log while another
process opens the file."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import anyio

from agentrl.errors import GraderFailure, SettingsError
from agentrl.rm_hub.grade import Grade
from agentrl.tools.threads import run_in_daemon_thread

_WAIT = 30.0
"""Seconds to wait for another process's write."""


class JudgeCache:
    """An async context manager around the file; it is made if it is not there. Raises SettingsError: the file cannot be
    opened, or is something else."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser()

    async def __aenter__(self) -> Self:
        self._one_at_a_time = anyio.CapacityLimiter(1)
        try:
            self._db = await run_in_daemon_thread(self._open)
        except (sqlite3.Error, OSError) as error:
            raise SettingsError(
                f"--judge-cache-path {self.path}: cannot be used as a cache: {error}; name a file of its own in a "
                "folder that you may write to"
            ) from error
        return self

    async def __aexit__(self, *exc: object) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(_WAIT):
            await self._run(self._db.close)

    async def get(self, key: str) -> Grade | None:
        """The verdict kept under `key`, or None."""
        found = "SELECT correct, score, reason FROM verdicts WHERE key=?"
        row = await self._run(lambda: self._db.execute(found, (key,)).fetchone())
        return None if row is None else Grade(float(row[1]), bool(row[0]), reason=str(row[2]))

    async def put(self, key: str, verdict: Grade) -> None:
        """Keep a verdict; an older one under the same key stays."""
        reason = verdict.reason.encode(errors="replace").decode()  # SQLite takes no lone surrogates
        row = (key, verdict.correct, verdict.score, reason)
        await self._run(lambda: self._db.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?)", row))

    async def _run(self, work: Callable[[], Any]) -> Any:
        async with self._one_at_a_time:
            try:
                with anyio.fail_after(2 * _WAIT):
                    return await run_in_daemon_thread(work)
            except (sqlite3.Error, TimeoutError) as error:
                raise GraderFailure(
                    f"the judge's cache {self.path} failed: {error or 'it is locked'}; free space, or name another "
                    "--judge-cache-path",
                    kind="judge_cache",
                ) from error

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(self.path, timeout=_WAIT, check_same_thread=False, isolation_level=None)
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, correct INT, score REAL, reason TEXT)")
        return db
