"""Files of a few bytes that expand to many bytes of rows."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl import rowfiles
from agentrl.errors import DataError
from agentrl.rowfiles import MAX_ROW_BYTES, open_rows


def repeated(count: int, size: int) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), ["a" * size])


def parquet(folder: Path, table: Any) -> str:
    pq.write_table(table, folder / "p.parquet", compression="zstd")
    assert (folder / "p.parquet").stat().st_size < 10_000
    return str(folder / "p.parquet")


def test_a_long_row_is_refused(tmp_path: Path) -> None:
    rows = open_rows(parquet(tmp_path, pa.table({"input": ["a" * (MAX_ROW_BYTES + 1), "b"]})))
    with pytest.raises(DataError, match=r"p.parquet row 0 has 33,554,\d+ bytes; at most 33,554,432"):
        rows.read(0)
    assert rows.read(1) == {"input": "b"}


def test_a_long_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'\n{"a": 1}\n{"a": "' + b"x" * MAX_ROW_BYTES + b'"}\n{"a": 2}')
    rows = open_rows(str(tmp_path / "p.jsonl"))
    with pytest.raises(DataError, match=r"p.jsonl line 3 has 33,554,\d+ bytes"):
        rows.read(1)
    assert [rows.read(0), rows.read(2)] == [{"a": 1}, {"a": 2}]


def test_what_many_rows_share_is_kept_once(tmp_path: Path) -> None:
    """Without sharing, 100,000 rows would take 100 GB."""
    rows = open_rows(parquet(tmp_path, pa.table({"input": repeated(100_000, 1_000_000)})))
    assert len(rows.read(99_999)["input"]) == 1_000_000


@pytest.mark.parametrize("nested", [False, True])
def test_what_one_row_has_many_times_is_counted(tmp_path: Path, nested: bool) -> None:
    values = repeated(5000, 1_000_000)
    values = pa.StructArray.from_arrays([values], names=["text"]) if nested else values
    listed = pa.ListArray.from_arrays(pa.array([0, 5000], pa.int32()), values)
    rows = open_rows(parquet(tmp_path, pa.table({"input": ["x"], "list": listed})))
    with pytest.raises(DataError, match=r"row 0 has 5,000,\d+,\d+ bytes"):
        rows.read(0)


def test_maps_are_read_and_counted(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.string())
    maps = pa.array([[("k", "v")], [], [("a", "b"), ("k", "a" * (MAX_ROW_BYTES + 1))]], kind)
    empty = pa.array([[], [], []], pa.list_(kind))
    rows = open_rows(parquet(tmp_path, pa.table({"input": ["x", "y", "z"], "extra": maps, "empty": empty})))
    assert [rows.read(at)["extra"] for at in range(2)] == [[("k", "v")], []]
    with pytest.raises(DataError, match=r"row 2 has 33,554,\d+ bytes"):
        rows.read(2)


def test_a_large_row_group_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowfiles, "MAX_ROW_GROUP_BYTES", 1 << 20)
    with pytest.raises(DataError, match=r"row group 0 decodes to 8,\d+,\d+ bytes; the maximum is 1,048,576"):
        open_rows(parquet(tmp_path, pa.table({"input": repeated(1_000_000, 1)})))
