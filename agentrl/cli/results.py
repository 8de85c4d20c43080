"""Files of grading results, written atomically: to a temporary file, which is renamed at the end. An interrupted
command leaves no file."""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import GraderFailure, SettingsError
from agentrl.files import replacing
from agentrl.rm_hub.grade import Grade

_BATCH = 256

Write = Callable[[Mapping[str, Any]], object]  # takes results one after another


@contextmanager
def writing(path: str | None, inputs: str) -> Iterator[Write]:
    """Open a results file by its suffix (None keeps no results). It appears if the block ends without an error. Raises
    SettingsError: the suffix is another one, the path is the input file, or the folder is missing."""
    if path is None:
        yield lambda row: None
        return
    target = Path(path).expanduser()
    if target.suffix not in (".jsonl", ".parquet"):
        raise SettingsError(f"--out {path}: expected a name that ends in .jsonl or .parquet")
    if target.resolve() == Path(inputs).expanduser().resolve():
        raise SettingsError(f"--out {path} is the file that is read; name another")
    if not target.parent.is_dir():
        raise SettingsError(f"--out {path}: the folder {target.parent} does not exist")
    with replacing(target) as part, (_to_jsonl if target.suffix == ".jsonl" else _to_parquet)(part) as write:
        yield write


@contextmanager
def _to_jsonl(path: Path) -> Iterator[Write]:
    with path.open("w", encoding="utf-8") as file:
        # With ASCII escapes, as texts of models have lone surrogates.
        yield lambda row: print(json.dumps(row, default=str), file=file)


@contextmanager
def _to_parquet(path: Path) -> Iterator[Write]:
    """Write results as columns; `id`, `input` and `parts` hold JSON text, since their types differ from row to row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"row": pa.int64(), "score": pa.float64(), "correct": pa.bool_()}
    texts = ("id", "input", "extracted", "reason", "parts", "unjudged", "failure")
    schema = pa.schema([*columns.items(), *((name, pa.string()) for name in texts)])
    rows: list[dict[str, Any]] = []

    def write(row: Mapping[str, Any]) -> None:
        told = {n: json.dumps(row[n], default=str) for n in ("id", "input", "parts") if row.get(n) is not None}
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


_BINS = 10


@dataclass(slots=True)
class Summary:
    """Counts over grades and failures, added one by one (8 bytes each)."""

    scores: array[float] = field(default_factory=lambda: array("d"))
    correct: int = 0
    extracted: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    unjudged: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Grade | GraderFailure) -> None:
        if isinstance(outcome, GraderFailure):
            self.failures[outcome.kind] += 1
            return
        self.scores.append(outcome.score)
        self.correct += outcome.correct
        self.extracted += outcome.extracted is not None
        self.unjudged[outcome.unjudged] += bool(outcome.unjudged)

    @property
    def total(self) -> int:
        return len(self.scores) + self.failures.total()

    def lines(self) -> list[tuple[str, str]]:
        graded = len(self.scores)
        rows = [("answers", str(self.total)), ("graded", str(graded))]
        if graded:
            rows.append(("mean score", f"{math.fsum(self.scores) / graded:.4f}"))
            rows += [("accuracy", _share(self.correct, graded)), ("answer found", _share(self.extracted, graded))]
        rows += [(f"not judged: {kind}", str(count)) for kind, count in self.unjudged.most_common() if count]
        rows += [(f"failed: {kind}", str(count)) for kind, count in self.failures.most_common()]
        return rows

    def histogram(self) -> list[tuple[str, int]]:
        """Return labels and counts of score ranges: single values if there are few, else ten equal ranges."""
        if len(values := Counter(self.scores)) <= _BINS:
            return [(f"{value:g}", values[value]) for value in sorted(values)]
        low, high = min(values), max(values)
        if not math.isfinite(width := (high - low) / _BINS):
            return [(f"{low:g} to {high:g}", len(self.scores))]
        counts = Counter(min(_BINS - 1, int((score - low) / width)) for score in self.scores)
        return [(f"{low + at * width:.3g} to {low + (at + 1) * width:.3g}", counts[at]) for at in range(_BINS)]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%} ({part} of {whole})"
