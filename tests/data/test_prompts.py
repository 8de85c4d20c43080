"""Prompt files: every shape that is accepted, and every sentence that a bad one earns."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.prompts import PromptData, PromptRow
from agentrl.data.settings import DataSettings
from agentrl.errors import DataError
from agentrl.rowfiles import split_slice
from tests.buffer.make import prompts, write_jsonl

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "search"}}


def one(tmp_path: Path, row: Any, **options: Any) -> PromptRow:
    return PromptData(str(write_jsonl(tmp_path / "p.jsonl", [row])), DataSettings(**options))[0]


def test_a_full_row(tmp_path: Path) -> None:
    row = {"q": CHAT, "a": ["4", "four"], "meta": {"k": 1}, "tools": [TOOL]}
    read = one(tmp_path, row, input_key="q", label_key="a", metadata_key="meta")
    assert read == PromptRow(0, CHAT, ["4", "four"], {"k": 1}, [TOOL])


def test_metadata_and_tools_as_json_text(tmp_path: Path) -> None:
    read = one(tmp_path, {"input": "x", "metadata": '{"k": 1}', "tools": '[{"type": "function"}]'})
    assert read.metadata == {"k": 1}
    assert read.tools == [{"type": "function"}]


def test_a_bare_row_has_defaults(tmp_path: Path) -> None:
    assert one(tmp_path, {"input": "x"}) == PromptRow(0, "x", None, {}, None)


def test_a_text_prompt_becomes_a_user_message_on_request(tmp_path: Path) -> None:
    assert one(tmp_path, {"input": "x"}, apply_chat_template=True).prompt == [{"role": "user", "content": "x"}]
    assert one(tmp_path, {"input": CHAT}, apply_chat_template=True).prompt == CHAT


def test_lines_may_be_blank_and_the_last_may_lack_its_newline(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('\n{"input": "a"}\n  \n\n{"input": "é\\u2028"}')
    assert [row.prompt for row in PromptData(str(file))] == ["a", "é\u2028"]


def parquet(path: Path, rows: list[dict[str, Any]], group: int = 2) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def test_parquet_reads_like_jsonl(tmp_path: Path) -> None:
    rows = [{"input": CHAT, "label": str(i), "metadata": {"k": i}} for i in range(21)]
    a = PromptData(str(parquet(tmp_path / "p.parquet", rows)), DataSettings(label_key="label"))
    b = PromptData(str(write_jsonl(tmp_path / "p.jsonl", rows)), DataSettings(label_key="label"))
    backwards = range(20, -1, -1)
    assert [a[i] for i in backwards] == [b[i] for i in backwards]


@given(st.integers(-6, 6) | st.none(), st.integers(-6, 6) | st.none())
def test_slices_are_pythons(tmp_path_factory: pytest.TempPathFactory, start: int | None, end: int | None) -> None:
    file = prompts(tmp_path_factory.mktemp("slice") / "p.jsonl", 5)
    spec = f"{file}@[{'' if start is None else start}:{'' if end is None else end}]"
    want = [f"question {i}" for i in range(5)][start:end]
    if want:
        data = PromptData(spec)
        assert [row.prompt for row in data] == want
        assert [row.index for row in data] == list(range(len(want)))
    else:
        with pytest.raises(DataError, match=r"the slice is empty; .*p\.jsonl has 5 rows"):
            PromptData(spec)


def test_the_limit(tmp_path: Path) -> None:
    data = PromptData(str(prompts(tmp_path / "p.jsonl", 9)), DataSettings(prompt_data_limit=4))
    assert len(data) == 4
    with pytest.raises(IndexError):
        data[4]
    assert data.sample(5)[4] == "question 0"


def test_a_malformed_slice() -> None:
    with pytest.raises(DataError, match="expected a slice as path@"):
        split_slice("p.jsonl@[a:b]")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x", "b": 1}, "line 1: no field 'input' for the prompt; it has the fields 'b', 'question'; set --input-key"),
        ({}, "it has no fields at all"),
        ({"input": 3}, "field 'input' must be a string or a list of chat messages, got a number"),
        ({"input": None}, "field 'input' must be a string or a list of chat messages, got null"),
        ({"input": []}, "field 'input' is an empty list; expected at least one chat message"),
        ({"input": [{"content": "x"}]}, "field 'input' message 0 must be an object with a string 'role'"),
        ({"input": ["x"]}, "field 'input' message 0 must be an object with a string 'role', got 'x'"),
        ({"input": "x", "metadata": [1]}, "field 'metadata' must be an object, got a list"),
        ({"input": "x", "metadata": "{"}, "field 'metadata' is text but not JSON"),
        ({"input": "x", "metadata": {"messages": []}}, "field 'metadata' has the key 'messages', under which agentrl"),
        ({"input": "x", "tools": {"a": 1}}, "field 'tools' must be a list, got an object"),
        ({"input": "x", "tools": ["search"]}, "field 'tools' entry 0 must be a tool schema \\(an object\\), got a string"),
        ([1], "line 1: expected a JSON object, got a list"),
        ("text", "line 1: expected a JSON object, got a string"),
    ],
)  # fmt: skip
def test_bad_rows(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        one(tmp_path, row)


def test_a_missing_label_names_the_fields(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no field 'y' for the label; it has the fields 'input'; set --label-key"):
        one(tmp_path, {"input": "x"}, label_key="y")


def test_malformed_json_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"input": "a"}\n\n{"input": "b"\n')
    data = PromptData(str(file))
    assert data[0].prompt == "a"
    with pytest.raises(DataError, match=r"p\.jsonl line 3: malformed JSON at column \d+"):
        data.check()


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "p.csv").write_text("a,b")
    (tmp_path / "bad.parquet").write_text("not parquet")
    parquet(tmp_path / "none.parquet", [{"input": "x"}])
    pq.write_table(pa.table({"input": pa.array([], pa.string())}), tmp_path / "none.parquet")
    for name, message in {
        "absent.jsonl": "absent.jsonl does not exist; check the path",
        "": "is not a file",
        "empty.jsonl": "is empty; expected one JSON object a line",
        "p.csv": "has suffix '.csv'; expected .jsonl or .parquet",
        "bad.parquet": "not a readable Parquet file",
        "none.parquet": "is empty; expected at least one row",
    }.items():
        with pytest.raises(DataError, match=message):
            PromptData(str(tmp_path / name))
