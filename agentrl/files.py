"""Files: atomic writes, of which a kill at any moment leaves the old file or the new file; tables beside a module."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_log = logging.getLogger(__name__)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`. When the block ends, the file there durably replaces `path`. If the block
    raises or writes nothing, the old file stays. Creates the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield draft
        if draft.is_file():
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(draft, path)
            sync_folder(path.parent)
    finally:
        if draft.is_file():
            draft.unlink()


def read_table(module: str, name: str) -> list[list[str]]:
    """Return the rows of the tab-separated file `name` beside a module's `__file__`, without the header."""
    lines = Path(module).with_name(name).read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines[1:]]


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, if its file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file atomically and durably; text as UTF-8."""
    with replacing(path) as draft:
        draft.write_bytes(data.encode() if isinstance(data, str) else data)


def remove_folder(path: Path) -> None:
    """Remove a folder that is no longer needed. Ignores files. Logs a warning if the folder cannot be removed."""
    try:
        if path.is_dir():
            shutil.rmtree(path)
    except OSError as error:
        _log.warning("the old folder %s cannot be removed (%s); it is no longer needed", path, error)


def stamp(*files: Path) -> tuple[int, ...]:
    """Return a stamp that changes if one of the files is written, created, replaced or removed."""
    found: list[int] = []
    for file in files:
        with suppress(FileNotFoundError):
            stat = file.stat()
            found += [stat.st_ino, stat.st_mtime_ns, stat.st_size]
    return tuple(found)
