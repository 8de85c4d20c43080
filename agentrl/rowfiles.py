"""Random access to the rows of a JSONL or Parquet file without loading it.

1. JSONL costs 8 bytes a row (its byte offset); a row is read and parsed when asked for.
2. Parquet keeps the row-group boundaries and a few decoded row groups.
3. Every error is a `DataError` that names the file, and the line or row. A duplicate key or column is an error too."""

import codecs
import json
import os.path
import re
import shlex
from array import array
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import orjson

from agentrl.errors import DataError, raised_as

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>(?:-?\d+)?):(?P<end>(?:-?\d+)?)\]$")
_CACHED_ROW_GROUPS = 4
MAX_ROW_BYTES = 32 << 20
MAX_ROW_GROUP_BYTES = 2 << 30  # of a decoded Parquet row group; its compressed pages can be much smaller
# By file suffix, a Python expression that reads rows from standard input.
_ROWS_OF = {".csv": "csv.DictReader(sys.stdin)", ".json": "json.load(sys.stdin)"}
_ROWS_OF[".tsv"] = 'csv.DictReader(sys.stdin, delimiter="\\t")'


class RowFile(Protocol):
    """Rows by index, each a dict of plain values."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> dict[str, Any]:
        """Row `index`, from 0."""

    def where(self, index: int) -> str:
        """The row's place in words for an error message."""


def split_slice(spec: str) -> tuple[str, slice]:
    """Split `path@[start:end]` into the path and a slice; a plain path gets the slice of everything."""
    if (found := _SLICE.match(spec)) is None:
        if "@[" in spec:
            raise DataError(f"{spec}: expected a slice as path@[start:end] with integers; either may be omitted")
        return spec, slice(None)
    start, end = (int(text) if (text := found[name]) else None for name in ("start", "end"))
    return found["path"], slice(start, end)


def open_rows(path: str, what: str = "prompt data", parse: Callable[[bytes], Any] | None = None) -> RowFile:
    """Open a file by its suffix: .jsonl or .parquet. `what`: its name in messages. `parse`: reads a line of JSONL and
    raises `ValueError`; default `read_json`. Raises DataError: the path is missing, a folder, empty or unreadable, or
    has another suffix."""
    file = Path(os.path.expanduser(path))
    if not os.path.exists(file):
        raise DataError(f"{what} {file} does not exist; check the path (current folder: {Path.cwd()})")
    if not os.path.isfile(file):
        raise DataError(f"{what} {file} is not a file; name one .jsonl or .parquet file")
    if file.suffix == ".jsonl":
        return JsonlFile(file, parse or read_json)
    if file.suffix == ".parquet":
        return ParquetFile(file)
    convert = ""
    if rows := _ROWS_OF.get(file.suffix):
        code = f"import csv, json, sys; [print(json.dumps(row)) for row in {rows}]"
        files = f"< {shlex.quote(str(file))} > {shlex.quote(str(file.with_suffix('.jsonl')))}"
        convert = f"; convert it: python -c '{code}' {files}"
    raise DataError(f"{what} {file} has suffix {file.suffix!r}; expected .jsonl or .parquet{convert}")


class JsonlFile:
    """One JSON object a line; blank lines are skipped but counted as lines."""

    def __init__(self, path: Path, parse: Callable[[bytes], Any]) -> None:
        self.path, self._parse = path, parse
        self._offsets, self._rows_before_blank = array("q"), list[int]()
        with raised_as(DataError, f"{path}: cannot be read", OSError, shown=": {.strerror}"):
            self._file = path.open("rb")
        if self._file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            convert = f"iconv -f UTF-16 -t UTF-8 {shlex.quote(str(path))} > NEW.jsonl"
            raise DataError(f"{path} is UTF-16 text; expected UTF-8. Convert it: {convert}")
        self._size = 0
        for line in self._file:
            if line.isspace():
                self._rows_before_blank.append(len(self._offsets))
            else:
                self._offsets.append(self._size)
            self._size += len(line)
        if not self._offsets:
            raise DataError(f"{path} is empty; expected one JSON object a line")

    def __len__(self) -> int:
        return len(self._offsets)

    def where(self, index: int) -> str:
        return f"{self.path} line {index + 1 + bisect_right(self._rows_before_blank, index)}"

    def read(self, index: int) -> dict[str, Any]:
        self._file.seek(self._offsets[index])
        if (ends := [*self._offsets[index + 1 : index + 2], self._size][0]) - self._offsets[index] > MAX_ROW_BYTES:
            raise _too_long(self.where(index), ends - self._offsets[index])
        line = self._file.readline().rstrip()  # with a newline, the error of a truncated object would be at column 1
        try:
            row = self._parse(line)
        except (ValueError, RecursionError) as error:
            said = f" at column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else f": {error}"
            expected = "expected one complete JSON object on the line"
            raise DataError(f"{self.where(index)}: malformed JSON{said}; {expected}") from error
        if not isinstance(row, dict):
            raise DataError(f"{self.where(index)}: expected a JSON object, got {json_type(row)}")
        return row


class ParquetFile:
    """A Parquet file, decoded one row group at a time. Shuffled reads access row groups at random: write files for
    shuffled use with small row groups (a few thousand rows), or as JSONL."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        self._broken = (pa.ArrowException, ArithmeticError, LookupError, OSError, ValueError)
        with raised_as(DataError, f"{path}: not a readable Parquet file", *self._broken):
            with pq.ParquetFile(path) as file:
                leaves = [file.schema.column(number) for number in range(file.metadata.num_columns)]
            texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
            lists = [number for number, leaf in enumerate(leaves) if leaf.max_repetition_level]
            # Dictionary encoding keeps a repeated text once.
            self._file = pq.ParquetFile(path, read_dictionary=texts)
            meta, names = self._file.metadata, self._file.schema_arrow.names
            counts = [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]
            self._starts: list[int] = list(accumulate(counts, initial=0))
            if not len(self):
                raise DataError(f"{path} is empty; expected at least one row")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"{path}: column {twice[0]!r} occurs twice; rename one")
        for group in range(meta.num_row_groups):
            own = meta.row_group(group)
            # Call `column` only for lists: pyarrow 26 aborts on damaged statistics.
            values = sum(own.column(number).num_values for number in lists) + own.num_rows * (len(leaves) - len(lists))
            size = own.total_byte_size + 8 * values
            if size > MAX_ROW_GROUP_BYTES:
                said = f"{path}: row group {group} decodes to {size:,} bytes; the maximum is {MAX_ROW_GROUP_BYTES:,}"
                raise DataError(f"{said}. Write the file with smaller row groups, a few thousand rows each")
        self._group = lru_cache(_CACHED_ROW_GROUPS)(self._file.read_row_group)

    def __len__(self) -> int:
        return self._starts[-1]

    def where(self, index: int) -> str:
        return f"{self.path} row {index}"

    def read(self, index: int) -> dict[str, Any]:
        group = bisect_right(self._starts, index) - 1
        remedy = "the file is damaged; write it again"
        with raised_as(DataError, f"{self.where(index)} cannot be read", *self._broken, remedy=remedy):
            found = self._group(group).slice(index - self._starts[group], 1)
            if (size := sum(_decoded(column.combine_chunks()) for column in found.columns)) > MAX_ROW_BYTES:
                raise _too_long(self.where(index), size)
            return dict(found.to_pylist()[0])


def _decoded(array: Any) -> int:
    """Return the bytes of an Arrow array as plain values. A dictionary-encoded text counts once per use."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_dictionary(kind):
        uses = array.indices.drop_null().value_counts()
        lengths = pc.binary_length(array.dictionary.take(uses.field("values")))
        return int(pc.sum(pc.multiply(lengths, uses.field("counts"))).as_py() or 0)
    if pa.types.is_map(kind):  # `flatten` does not take maps
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return _decoded(array.values.slice(first, last - first))
    if pa.types.is_struct(kind):
        return sum(map(_decoded, array.flatten()))
    return _decoded(array.flatten()) if pa.types.is_nested(kind) else int(array.nbytes)


def _too_long(where: str, size: int) -> DataError:
    return DataError(f"{where} has {size:,} bytes; at most {MAX_ROW_BYTES:,}. Shorten it, or keep its data in a file")


def dump_json(value: Any, fallback: Any = None) -> bytes:
    """Return orjson's JSON of `value`. If an integer has more than 64 bits, return json's text of `fallback` (default:
    `value`). Raises TypeError: `value` is not serializable as JSON."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        if "64-bit" not in str(error) or not _has_text_keys(value):
            raise
        plain = lambda v: orjson.loads(orjson.dumps(v, option=orjson.OPT_SERIALIZE_NUMPY))  # noqa: E731
        return json.dumps(value if fallback is None else fallback, default=plain).encode()


def _has_text_keys(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(inner) for key, inner in value.items())
    return not isinstance(value, (list, tuple)) or all(map(_has_text_keys, value))


def read_json(text: bytes | str) -> Any:
    """Return the JSON value, with integers of any size. Raises ValueError: it is malformed, an object has a duplicate
    name, or it is nested deeper than can be stored."""
    with raised_as(ValueError, "it cannot be stored", TypeError):
        orjson.dumps([[[orjson.loads(text)]]])  # rejects NaN, invalid Unicode, and depth (a group adds 3 levels)
    return json.loads(text, object_pairs_hook=_unique)


def json_or_text(text: str) -> Any:
    """`8` is 8, `true` is True, `[1, 2]` a list; anything that is not JSON, or too long or deep to be read, stays text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError(f"an object has the key {next(name for name in found if names.count(name) > 1)!r} twice")
    return found


def json_type(value: object) -> str:
    """The JSON name of a value's type, with its article."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
