"""Files of answers to grade, read as a stream, and files of results, written whole or not at all.

1. JSONL (also from standard input, `-`) is read line by line, Parquet in small batches: the size of a file does not
   matter.
2. Keys may name a field inside another: `choices.0.message.content`. A field of that whole name goes first.
3. Every error is a `DataError` with file, line (Parquet: row) and key, and the nearest key that is there.
4. Results go to a file beside the final one, which takes its name at the end: an interrupted command leaves nothing.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from agentrl.errors import DataError, SettingsError
from agentrl.files import replacing

_BATCH = 256
SUFFIXES = (".jsonl", ".parquet")

Write = Callable[[Mapping[str, Any]], object]
"""Takes results one after another."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its place in words, its number (JSONL lines from 1, Parquet rows from 0), its fields, and how far into the
    file it ends, from 0 to 1 (None where that is unknown)."""

    where: str
    number: int
    fields: Mapping[str, Any]
    done: float | None = None
    problem: str = ""
    """What is wrong with a row that could not be read; it has no fields."""

    def get(self, key: str | None, usual: str, needed: bool = False) -> Any:
        """The value under `key`; without one that under the `usual` key, and None where that is neither there nor needed.

        Raises:
            DataError: it is not there, with the nearest key that is, or the row could not be read.
        """
        if self.problem:
            raise DataError(self.problem)
        try:
            return _look_up(self.fields, key or usual)
        except LookupError:
            if key is None and not needed:
                return None
        objects = [(name, value) for name, value in self.fields.items() if isinstance(value, Mapping)]
        names = [*map(str, self.fields), *(f"{name}.{inner}" for name, value in objects for inner in value)]
        close = difflib.get_close_matches(key or usual, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"its fields are {', '.join(names) or 'none'}"
        raise DataError(f"{self.where} has no field {key or usual!r}; {hint}")


def _look_up(fields: Any, key: str) -> Any:
    """A field by its whole name, else by its parts between dots (numbers count in lists); LookupError without it."""
    if key in fields:
        return fields[key]
    for part in key.split("."):
        match fields:
            case Mapping():
                fields = fields[part]
            case list() | tuple() if part.removeprefix("-").isdecimal():
                fields = fields[int(part)]
            case _:
                raise LookupError(part)
    return fields


def read_rows(path: str) -> Iterator[Row]:
    """The rows of a .jsonl or .parquet file; `-` is JSONL from standard input.

    Raises:
        DataError: it is missing or of another kind, or the Parquet file is damaged. A malformed line is a row with a `problem`.
    """
    file = Path(path).expanduser()
    if path == "-":
        yield from _lines("standard input", sys.stdin.buffer, None)
    elif not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise DataError(f"{path} {what}; name one .jsonl or .parquet file")
    elif file.suffix == ".parquet":
        yield from _parquet(file)
    elif file.suffix == ".jsonl":
        with file.open("rb") as stream:
            yield from _lines(path, stream, file.stat().st_size)
    else:
        raise DataError(f"{path}: suffix {file.suffix!r}; expected .jsonl or .parquet")


def _lines(name: str, stream: Any, size: int | None) -> Iterator[Row]:
    at = 0
    for number, line in enumerate(stream, 1):
        at += len(line)
        if line.isspace():
            continue
        where, problem = f"{name} line {number}", ""
        fields: Any = {}
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            problem = f"{where}: malformed JSON ({error}); expected one complete JSON object on the line"
        if not isinstance(fields, dict):
            fields, problem = {}, f"{where}: expected a JSON object, got {type(fields).__name__}"
        yield Row(where, number, fields, min(1.0, at / size) if size else None, problem)


def _parquet(file: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            batches = (batch.to_pylist() for batch in table.iter_batches(batch_size=_BATCH))
            for number, fields in enumerate(chain.from_iterable(batches)):
                yield Row(f"{file} row {number}", number, fields, (number + 1) / table.metadata.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file: {error}") from error


@contextmanager
def writing(path: str | None, inputs: str) -> Iterator[Write]:
    """Open a results file by its suffix; it is there when the block ends without an error, and not before.

    Args:
        path: the file; None takes results and keeps none.
        inputs: the file that is read.

    Raises:
        SettingsError: another suffix, the input itself, or a folder that is not there.
    """
    if path is None:
        yield lambda row: None
        return
    target = Path(path).expanduser()
    if target.suffix not in SUFFIXES:
        raise SettingsError(f"--out {path}: expected a name that ends in .jsonl or .parquet")
    if inputs != "-" and target.resolve() == Path(inputs).expanduser().resolve():
        raise SettingsError(f"--out {path} is the file that is read; name another")
    if not target.parent.is_dir():
        raise SettingsError(f"--out {path}: the folder {target.parent} does not exist")
    with replacing(target) as part, (_to_jsonl if target.suffix == ".jsonl" else _to_parquet)(part) as write:
        yield write


@contextmanager
def _to_jsonl(path: Path) -> Iterator[Write]:
    with path.open("w", encoding="utf-8") as file:
        # Escapes: the texts of models hold lone surrogates.
        yield lambda row: print(json.dumps(row), file=file)


@contextmanager
def _to_parquet(path: Path) -> Iterator[Write]:
    """Results as columns; `id`, `input` and `parts` hold JSON text, since their types differ from row to row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"row": pa.int64(), "score": pa.float64(), "correct": pa.bool_()}
    texts = ("id", "input", "extracted", "reason", "parts", "unjudged", "failure")
    schema = pa.schema([*columns.items(), *((name, pa.string()) for name in texts)])
    rows: list[dict[str, Any]] = []

    def write(row: Mapping[str, Any]) -> None:
        told = {name: json.dumps(row[name]) for name in ("id", "input", "parts") if row.get(name) is not None}
        rows.append({name: _utf8(told.get(name, row.get(name))) for name in schema.names})
        if len(rows) >= _BATCH:
            flush()

    def flush() -> None:
        file.write_table(pa.Table.from_pylist(rows, schema=schema))
        rows.clear()

    with pq.ParquetWriter(path, schema) as file:
        yield write
        flush()


def _utf8(value: Any) -> Any:
    return value.encode(errors="replace").decode() if isinstance(value, str) else value
