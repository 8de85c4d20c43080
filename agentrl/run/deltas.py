"""Copies of the weights on engine machines, updated with changed blocks only.

1. `write_delta` compares a version with the previous version. A changed block is stored as the compressed XOR of old
   and new bytes. The index has the position of each block, and the size and hash of each file.
2. `fetch` makes the copy of a version from the previous copy and the delta, or copies all if a file is damaged."""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypedDict

import numpy as np

from agentrl.errors import CheckpointError
from agentrl.files import remove_folder, write_atomic
from agentrl.train.checkpoints import whole_folder

_DELTA, _BLOCKS, _INDEX = "delta", "blocks", "index.json"
_BLOCK = 1 << 20
_log = logging.getLogger(__name__)


class _File(TypedDict):
    size: int
    hash: str
    blocks: list[tuple[int, int, int]]  # offset in the file; offset and length in the file of stored blocks


def write_delta(old: Path, new: Path) -> None:
    """Write the delta from version `old` to version `new` into the folder of `new`."""
    index: dict[str, _File] = {}
    (new / _DELTA).mkdir()
    with (new / _DELTA / _BLOCKS).open("wb") as out, ThreadPoolExecutor() as threads:
        for file in _files(new):
            size, offsets = file.stat().st_size, range(0, file.stat().st_size, _BLOCK)
            with file.open("rb") as after, _opened(old / file.name) as before:
                made = threads.map(partial(_difference, before, after), offsets)
                stored = ((offset, block) for offset, block in zip(offsets, made, strict=True) if block)
                blocks = [(offset, out.tell(), out.write(block)) for offset, block in stored]
            index[file.name] = {"size": size, "hash": _hash(file), "blocks": blocks}
    write_atomic(new / _DELTA / _INDEX, json.dumps(index))


def fetch(version: Path, into: Path, name: str, base: str | None) -> None:
    """Make the copy `into`/`name` of a version, once per machine. `base`: name of the copy to which the delta applies;
    None without a delta. Copies other than `base` are removed."""
    into.mkdir(parents=True, exist_ok=True)
    with (into / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (into / name).is_dir():
            return  # made already for another engine of this machine
        for old in into.iterdir():
            if old.name != base:
                remove_folder(old)
        if base is not None:
            try:
                with whole_folder(into / name) as made:
                    _patch(into / base, version / _DELTA, made)
                return
            except (OSError, ValueError, KeyError, TypeError, zlib.error, CheckpointError) as error:
                said = "%s: the delta is damaged or its base is missing (%s); the whole version is copied"
                _log.warning(said, version, error)
        with whole_folder(into / name) as made:
            for file in _files(version):
                shutil.copy2(file, made / file.name)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a version, without its delta."""
    return (file for file in sorted(folder.iterdir()) if file.is_file())


def _difference(before: BinaryIO, after: BinaryIO, offset: int) -> bytes:
    """Return the XOR of two files' blocks at `offset`, compressed; empty if they are equal."""
    new = os.pread(after.fileno(), _BLOCK, offset)
    old = os.pread(before.fileno(), len(new), offset)
    return b"" if old == new else zlib.compress(_xor(old, new), 1)


def _xor(old: bytes, change: bytes) -> bytes:
    """Return the XOR; a short `old` is padded with zeros."""
    padded = np.frombuffer(old[: len(change)].ljust(len(change), b"\0"), np.uint8)
    return (padded ^ np.frombuffer(change, np.uint8)).tobytes()


def _patch(base: Path, delta: Path, made: Path) -> None:
    """Write a version's files into `made`. Raises CheckpointError or another error: a file is damaged."""
    index: dict[str, _File] = json.loads((delta / _INDEX).read_bytes())
    with (delta / _BLOCKS).open("rb") as stored:
        for name, file in index.items():
            if Path(name).name != name:
                raise CheckpointError(f"the index names {name!r:.80}, which is no file of the folder")
            changed = {offset: (place, length) for offset, place, length in file["blocks"]}
            with (made / name).open("wb") as out, _opened(base / name) as before:
                for offset in range(0, file["size"], _BLOCK):
                    block = os.pread(before.fileno(), min(_BLOCK, file["size"] - offset), offset)
                    if offset in changed:
                        place, length = changed[offset]
                        block = _xor(block, zlib.decompress(os.pread(stored.fileno(), length, place)))
                    out.write(block)
            if _hash(made / name) != file["hash"]:
                raise CheckpointError(f"{name} does not have the hash that the index names")


def _opened(file: Path) -> BinaryIO:
    """Open a file; return an empty file if it is missing."""
    with suppress(FileNotFoundError):
        return file.open("rb")
    return open(os.devnull, "rb")


def _hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()[:32]
