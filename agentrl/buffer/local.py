"""A ledger on a local disk (`--ledger-dir`), with a copy in the run's folder.

1. The ledger is `<ledger-dir>/<home>/ledger.sqlite`. `home` is a new name each time a copy becomes a ledger. The copy
   contains the name, so that another run's ledger, or an older one on this disk, is not mistaken for the run's.
2. A copy is one consistent state, written atomically. It is made before each checkpoint, so that it has every step that
   a checkpoint covers. If the local file is lost, groups that completed after the copy are generated again."""

import logging
import shutil
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

from agentrl.buffer.sqlite import RESTORE, make_empty, read_meta
from agentrl.errors import LedgerError, raised_as
from agentrl.files import replacing

_OWNER = "run"  # file beside the ledger with the path of its copy
SOURCE = ".source"  # suffix of the file beside a ledger in which a user's data source is saved
_log = logging.getLogger(__name__)


def find_ledger(file: Path, ledger_dir: str | None) -> Path:
    """Return the ledger of the run whose folder has `file`: the one below `ledger_dir` if this machine has it, else
    `file`."""
    if ledger_dir is None or (home := read_meta(file).get("home")) is None:
        return file
    found = Path(ledger_dir).expanduser().resolve() / home / file.name
    owner = Path(text.read_text()) if (text := found.with_name(_OWNER)).is_file() else file
    copied = owner.is_file() and not owner.samefile(file)  # this run's folder is a copy of another run's
    return found if found.is_file() and not copied else file


def place_ledger(file: Path, ledger_dir: str | None) -> Path:
    """Return the ledger to open for the run whose folder has `file`: `file` itself, or a ledger below `ledger_dir`,
    made from `file` if this machine has none. Raises LedgerError: the ledger cannot be read or made."""
    home, what = read_meta(file).get("home"), f"ledger {file} cannot be placed in --ledger-dir {ledger_dir}"
    with raised_as(LedgerError, what, OSError, sqlite3.Error, remedy=RESTORE):
        if ledger_dir is None:
            if home is not None:
                _log.warning("the ledger of the run was in --ledger-dir; it goes on with the copy in %s", file)
                _set_home(file, None)
            return file
        if (found := find_ledger(file, ledger_dir)) != file:
            _log.info("the run goes on with its ledger %s", found)
            found.with_name(_OWNER).write_text(str(file.resolve()))
            return found
        folder = Path(ledger_dir).expanduser().resolve()
        made = folder / (home := uuid.uuid4().hex) / file.name
        made.parent.mkdir(0o700, parents=True)
        if file.is_file():
            _log.warning("%s has no ledger of this run; it goes on with the copy in %s", folder, file)
            copy_ledger(file, made)
        else:
            make_empty(made)
        made.with_name(_OWNER).write_text(str(file.resolve()))
        _set_home(made, home)
        copy_ledger(made, file)
    return made


def copy_ledger(ledger: Path, to: Path) -> None:
    """Copy a ledger, which may be open, and the file of its data source. Raises OSError, sqlite3.Error."""
    # The source first: a source older than the ledger repeats prompts, a newer one would lose prompts.
    if (source := ledger.with_name(ledger.name + SOURCE)).is_file():
        with replacing(to.with_name(to.name + SOURCE)) as draft:
            shutil.copyfile(source, draft)
    with replacing(to) as draft, closing(sqlite3.connect(ledger)) as db, closing(sqlite3.connect(draft)) as out:
        db.backup(out)
        out.execute("PRAGMA journal_mode=DELETE")  # one file, which any machine can read over a network


def _set_home(file: Path, home: str | None) -> None:
    with closing(sqlite3.connect(file)) as db, db:
        db.execute("DELETE FROM meta WHERE key='home'")
        db.executemany("INSERT INTO meta VALUES ('home', ?)", [(home,)] if home else [])
