"""Prompt files: every accepted shape, and the error message for every bad one."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.prompts import PromptData, PromptRow, open_prompts
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
    read = one(tmp_path, {"input": "x", "metadata": '{"k": 1}', "tools": '[{"name": "search"}]'})
    assert read.metadata == {"k": 1}
    assert read.tools == [{"name": "search"}]


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


def test_a_label_of_null_is_read_from_either_kind_of_file(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"input": "a", "label": "1"}, {"input": "b", "label": None}]
    for file in (parquet(tmp_path / "p.parquet", rows), write_jsonl(tmp_path / "p.jsonl", rows)):
        assert [row.label for row in PromptData(str(file), DataSettings(label_key="label"))] == ["1", None]
        with pytest.raises(DataError, match="no field 'answer' for the label; it has the fields 'input', 'label'"):
            PromptData(str(file), DataSettings(label_key="answer"))[1]


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
        ({"input": "x", "tools": ["search"]}, "field 'tools': tool 0: expected an OpenAI function schema with a name, got 'search'"),
        ({"input": "x", "tools": [TOOL, {"type": "function"}]}, "field 'tools': tool 1: expected an OpenAI function schema"),
        ({"input": ""}, "line 1: field 'input' is an empty text; expected a prompt, or set --input-key"),
        ({"input": " \n"}, "field 'input' is an empty text"),
        ({"input": [{"role": "narrator", "content": "x"}]}, "message 0 must have one of the roles system, developer, user,"),
        ({"input": [*CHAT, {"role": "user"}]}, "message 2 must have 'content', a text or a list of parts"),
        ({"input": [{"role": "user", "content": None}]}, "message 0 must have 'content'"),
        ({"input": [{"role": "user", "content": {"a": 1}}]}, "message 0 must have 'content'"),
        ({"input": [{"role": "user", "content": [3]}]}, "message 0 must have 'content'"),
        ({"input": "x", "metadata": '{"a": 1, "a": 2}'}, "'metadata' is text but not JSON: an object has the key 'a' twice"),
        ({"input": [{"role": "human", "content": "x"}]}, "message 0 must have one of the roles .*; ShareGPT's 'human' is 'user'"),
        ({"input": [*CHAT, {"role": "assistant", "content": "x"}]}, "line 1: field 'input': the last message is the assistant's"),
        ({"input": [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]}, "line 1: .* is the path 'u'; name the folder of images with --image-root"),
        ({"input": "x", "images": ["a.png"]}, "line 1: field 'images' is not shown to the model; set --image-key images"),
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


@pytest.mark.parametrize("name", ["metadata_key", "tool_key", "image_key"])
def test_a_named_field_that_no_row_has_is_refused(tmp_path: Path, name: str) -> None:
    file = write_jsonl(tmp_path / "p.jsonl", [{"input": "x"}, {"input": "y", "some": None}])
    said = "p.jsonl: no row has a field 'other'; the first has the fields 'input'; correct the key, or leave"
    with pytest.raises(DataError, match=said):
        open_prompts(DataSettings(prompt_data=str(file), **{name: "other"}))
    lazy = DataSettings(prompt_data=str(file), prompt_data_check="lazy", **{name: "other"})
    usual = DataSettings(prompt_data=str(file), **{name: DataSettings.model_fields[name].default})
    for good in (lazy, usual, DataSettings(prompt_data=str(file), **{name: "some"})):
        assert open_prompts(good) is not None


def test_malformed_json_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"input": "a"}\n\n{"input": "b"\n')
    data = PromptData(str(file))
    assert data[0].prompt == "a"
    with pytest.raises(DataError, match=r"p\.jsonl line 3: malformed JSON at column \d+"):
        data.check()


def test_calls_without_content_and_content_in_parts_are_messages(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    chat = [{"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}, call, {"role": "tool", "content": ""}]
    assert one(tmp_path, {"input": chat}).prompt == chat


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"input": "a", "label": 1, "label": 2}', "an object has the key 'label' twice"),
        ('{"input": "a", "metadata": {"b": {"c": 1, "c": 1}}}', "an object has the key 'c' twice"),
        ('{"input": "a", "label": NaN}', "malformed JSON at column"),
        ('{"input": "\\ud800"}', "malformed JSON at column"),
        ('{"input": "a", "label": ' + "[" * 400 + "]" * 400 + "}", "cannot be stored"),
        ('{"input": "a", "label": ' + "9" * 5000 + "}", "malformed JSON"),
    ],
)
def test_lines_that_json_alone_would_take_are_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"input": "first"}\n' + line)
    with pytest.raises(DataError, match=rf"p\.jsonl line 2: malformed JSON.*{said}|line 2: {said}"):
        PromptData(str(tmp_path / "p.jsonl"), DataSettings(label_key="label"))[1]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([1.0, float("nan")]), "row 1: field 'label': Out of range float values"),
        (pa.array([b"x", b"y"]), "row 0: field 'label': Object of type bytes"),
        (pa.array([0, 1], pa.timestamp("s")), "row 0: field 'label': Object of type datetime"),
    ],
)
def test_values_that_json_has_not_are_refused_where_they_are_used(tmp_path: Path, column: pa.Array, said: str) -> None:
    pq.write_table(pa.table({"input": ["a", "b"], "label": column}), tmp_path / "p.parquet")
    PromptData(str(tmp_path / "p.parquet")).check()
    with pytest.raises(DataError, match=rf"p\.parquet {said}"):
        PromptData(str(tmp_path / "p.parquet"), DataSettings(label_key="label")).check()


def test_damaged_parquet_is_named(tmp_path: Path) -> None:
    text = pa.array([1, 2]).cast(pa.string())
    pq.write_table(pa.Table.from_arrays([text, text, text], names=["input", "a", "a"]), tmp_path / "twice.parquet")
    with pytest.raises(DataError, match=r"twice\.parquet: column 'a' occurs twice"):
        PromptData(str(tmp_path / "twice.parquet"))
    raw = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe"))
    pq.write_table(pa.table({"input": raw}), tmp_path / "text.parquet")
    with pytest.raises(DataError, match=r"text\.parquet row 0 cannot be read: .*utf-8.*the file is damaged"):
        PromptData(str(tmp_path / "text.parquet"))[0]


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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("my rows.csv", "input,label\nHow much?,42\n"),
        ("r.tsv", "input\tlabel\nHow much?\t42\n"),
        ("r.json", '[{"input": "How much?", "label": "42"}]'),
    ],
)
def test_the_command_that_is_named_converts_a_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        PromptData(str(tmp_path / name))
    command = str(caught.value).partition("convert it: ")[2]
    subprocess.run(["bash", "-c", command.replace("python", sys.executable, 1)], check=True)
    row = PromptData(str((tmp_path / name).with_suffix(".jsonl")), DataSettings(label_key="label"))[0]
    assert (row.prompt, row.label) == ("How much?", "42")


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "wide.jsonl").write_text('{"input": "a"}\n', encoding="utf-16")
    with pytest.raises(DataError, match="is UTF-16 text; expected UTF-8. Convert it: iconv -f UTF-16 -t UTF-8"):
        PromptData(str(tmp_path / "wide.jsonl"))
