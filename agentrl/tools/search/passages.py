"""Passages, read from a corpus file, or stored on disk and mapped into memory."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import orjson

from agentrl.errors import DataError, disk_trouble, raised_as
from agentrl.rowfiles import open_rows

_TEXT_FIELDS = ("text", "contents", "content", "passage")
_ROWS, _OFFSETS = "passages.jsonl", "passages.offsets.npy"
_VERSION = 1
MAX_QUERY_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class Passage:
    """A text that can be found."""

    id: str
    text: str
    title: str = ""

    def hit(self, score: float) -> Hit:
        return Hit(self.id, self.text, self.title, score)


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that was found, with its score (higher is better; comparable within one query only)."""

    id: str
    text: str
    title: str
    score: float


def load_corpus(path: str | Path) -> Iterator[Passage]:
    """Yield the passages of a JSONL or Parquet file, one per row, read on demand. A row has `text` (or `contents`), and
    may have `id` (else its number) and `title`. In Search-R1's form, the first line of `contents` is the title in
    quotation marks. Raises DataError: the file is missing, empty or malformed, or a row has no text. The error names
    file, line and field."""
    rows = open_rows(str(path), what="corpus")
    for index in range(len(rows)):
        yield _passage(rows.read(index), index, rows.where(index))


def _passage(row: Mapping[str, Any], index: int, where: str) -> Passage:
    if (field := next((name for name in _TEXT_FIELDS if row.get(name) is not None), None)) is None:
        raise DataError(f"{where}: expected a passage's text in the field 'text' or 'contents', found {sorted(row)}")
    text, title = row[field], row.get("title") or ""
    for name, value in ((field, text), ("title", title)):
        if not isinstance(value, str):
            raise DataError(f"{where}: field {name!r} must be text, got {type(value).__name__}")
    if field == "contents" and not title:
        title, text = split_title(text)
    return Passage(str(index if row.get("id") is None else row["id"]), text, title)


def split_title(contents: str) -> tuple[str, str]:
    """Return title and text of `contents` in Search-R1's form; the title is "" if no quoted first line exists."""
    first, newline, rest = contents.partition("\n")
    return (first.strip().strip('"'), rest) if newline and contents.startswith('"') else ("", contents)


def numbered(passages: Iterable[Passage | str]) -> list[Passage]:
    """Return the passages; plain strings get their position as id."""
    return [Passage(str(at), entry) if isinstance(entry, str) else entry for at, entry in enumerate(passages)]


@contextmanager
def written_index(folder: str | Path, header: str, passages: Sequence[Passage]) -> Iterator[Path]:
    """Yield a folder to write an index to. At the end it gets the passages and becomes `folder`; an error removes it.
    `header`: file that marks this kind of index. Raises DataError: `folder` has other content or cannot be written."""
    target = Path(folder).expanduser().absolute()
    try:
        if target.exists() and not (target / header).is_file() and any(target.iterdir()):
            raise DataError(f"{target} holds something that is no search index; choose another folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as work:
            made = Path(work) / "index"
            made.mkdir()
            yield made
            offsets = array("q", [0])
            with (made / _ROWS).open("wb") as file:
                for passage in passages:
                    row = orjson.dumps({"id": passage.id, "title": passage.title, "text": passage.text}) + b"\n"
                    offsets.append(offsets[-1] + file.write(row))
            np.save(made / _OFFSETS, np.frombuffer(offsets, dtype=np.int64), allow_pickle=False)
            (made / header).write_text(json.dumps({"version": _VERSION, "passages": len(passages)}), encoding="utf-8")
            if target.exists():
                os.rename(target, Path(work) / "old")
            os.rename(made, target)
    except OSError as error:
        raise DataError(disk_trouble(error) or f"{target} cannot be written: {error}") from error


def find_index(folder: str | Path, header: str, missing: str) -> Path:
    """Return the folder of an index. Raises DataError: there is none (message `missing`), or its version differs."""
    source = Path(folder).expanduser()
    if not (source / header).is_file():
        raise DataError(f"{source}: {missing}")
    damage = (OSError, ValueError, TypeError, LookupError)
    with raised_as(DataError, f"{source}: {header} cannot be read", *damage, remedy="build the index again"):
        version = json.loads((source / header).read_text(encoding="utf-8"))["version"]
    if version != _VERSION:
        raise DataError(f"{source}: index version {version}, expected {_VERSION}; build it again")
    return source


class StoredPassages(Sequence[Passage]):
    """Passages in a folder: a JSONL file and the offsets of its lines, both memory-mapped, parsed on access."""

    def __init__(self, folder: Path) -> None:
        """Map the files. Raises DataError: the files are missing, or do not belong together."""
        what, remedy = f"{folder}: the index's passages cannot be read", "build the index again"
        with raised_as(DataError, what, OSError, ValueError, remedy=remedy), (folder / _ROWS).open("rb") as file:
            self._offsets: Any = np.load(folder / _OFFSETS, mmap_mode="r", allow_pickle=False)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._offsets) < 2 or int(self._offsets[-1]) != len(self._map):
            raise DataError(f"{folder}: {_ROWS} and {_OFFSETS} do not belong together; build the index again")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Passage: ...
    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...
    def __getitem__(self, index: int | slice) -> Passage | list[Passage]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        start, end = self._offsets[index % len(self)], self._offsets[index % len(self) + 1]
        row = orjson.loads(self._map[start:end])
        return Passage(row["id"], row["text"], row["title"])
