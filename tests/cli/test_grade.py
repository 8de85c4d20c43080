"""`agentrl grade` on real files, with the real process pool."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from agentrl.cli.main import run
from agentrl.cli.results import Summary
from agentrl.errors import GraderFailure
from agentrl.rm_hub import Grade
from tests.rm_hub.http_server import serving
from tests.support.nightly import nightly

ROWS: list[Mapping[str, object]] = [
    {"id": "a", "out": "Paris", "gold": "paris"},
    {"id": "b", "out": "Rome", "gold": "Paris"},
    {"id": "c", "out": "the paris", "gold": ["London", "Paris"]},
]
KEYS = ["--response-key", "out", "--label-key", "gold", "--grader-processes", "1"]


def jsonl(path: Path, rows: Sequence[Mapping[str, object]] = ROWS) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def parquet(path: Path, rows: Sequence[Mapping[str, object]]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def grade(*arguments: str) -> int:
    return run(["grade", "--rm-type", "exact_match", *arguments])


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert grade(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_a_file_is_graded_and_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert grade(jsonl(tmp_path / "a.jsonl"), *KEYS) == 0
    said = capsys.readouterr()
    rows = [line.split(None, 1) for line in said.out.splitlines()]
    assert ["accuracy", "66.67% (2 of 3)"] in [[a, b[0].strip()] for a, *b in rows if b]
    assert "mean score    0.6667" in said.out
    assert said.out.rstrip().endswith("2")
    assert said.err == "grading\n", "the bar is for terminals"


def test_results_as_jsonl_in_the_order_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.jsonl"
    assert grade(jsonl(tmp_path / "a.jsonl"), *KEYS, "--out", str(out)) == 0
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["row"], row["id"], row["score"], row["correct"], row["failure"]) for row in rows] == [
        (0, "a", 1.0, True, None),
        (1, "b", 0.0, False, None),
        (2, "c", 1.0, True, None),
    ]
    assert rows[0]["extracted"] == "Paris"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "r.jsonl"]


def test_the_summary_says_why_answers_were_not_graded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"response": "x"}, {"response": "y"}])
    assert run(["grade", "--rm-type", "remote_rm", path, "--rm-url", "http://127.0.0.1:9", "--limit", "2"]) == 1
    out = capsys.readouterr().out
    assert "failed: grader_unreachable" in out
    assert out.count("grader_unreachable, first at ") == 1
    assert "127.0.0.1:9" in out


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_that_json_does_not_know_are_kept_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    import pyarrow.parquet as pq

    rows = [{"response": "1", "label": "1", "id": b"a", "when": datetime(2026, 1, 2, 3)}]
    out = tmp_path / f"r.{suffix}"
    assert grade(parquet(tmp_path / "a.parquet", rows), "--out", str(out), "--grader-processes", "1") == 0
    assert "2026-01-02" in (out.read_text() if suffix == "jsonl" else pq.read_table(out).to_pylist()[0]["input"])


@pytest.mark.slow
def test_parquet_in_and_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow.parquet as pq

    rows = [{"response": f"{n % 2}", "label": "1", "id": n} for n in range(600)]
    out = tmp_path / "r.parquet"
    assert grade(parquet(tmp_path / "a.parquet", rows), "--out", str(out), "--grader-processes", "1") == 0
    table = pq.read_table(out).to_pylist()
    assert [row["row"] for row in table] == list(range(600))
    assert [row["correct"] for row in table] == [n % 2 == 1 for n in range(600)]
    assert table[7]["id"] == "7"


def test_explain_shows_failures_and_wrong_answers_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Mapping[str, object]] = [*ROWS, {"out": "x\x1b[31m\ud800", "gold": None}]
    assert grade(jsonl(tmp_path / "a.jsonl", rows), *KEYS, "--explain", "3") == 1
    out = capsys.readouterr().out
    first = [line for line in out.splitlines() if line.startswith(("right", "wrong", "not graded"))]
    assert [line.split("  ")[0] for line in first] == ["not graded", "wrong", "right"]
    assert "a.jsonl line 2" in first[1]
    assert "grader_no_label" in out
    assert "failed: grader_no_label  1" in out
    assert "\x1b" not in out


@pytest.mark.slow
def test_a_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"response": "a", "label": "a"}] * 5)
    assert grade(path, "--limit", "2", "--grader-processes", "1") == 0
    assert "answers       2" in capsys.readouterr().out


@pytest.mark.slow
def test_metadata_and_prompt_reach_a_reward_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    async def endpoint(request: Request) -> Response:
        seen.append(await request.json())
        return JSONResponse(0.5) if len(seen) < 3 else Response("down", status_code=503)

    rows = [{"response": "r", "extra": {"k": 1}, "q": "2+2?"}] * 3
    with serving(endpoint) as url:
        keys = ["--metadata-key", "extra", "--prompt-key", "q", "--rm-concurrency", "1"]
        code = run(["grade", "--rm-type", "remote_rm", jsonl(tmp_path / "a.jsonl", rows), "--rm-url", url, *keys])
    assert code == 1
    assert seen[0] == {"prompt": "2+2?", "response": "r", "label": None, "metadata": {"k": 1}}
    out = " ".join(capsys.readouterr().out.split())
    assert "mean score 0.5000" in out
    assert "failed: grader_http_503 1" in out


def test_the_reader_is_asked_for_unless_a_row_says_otherwise(tmp_path: Path) -> None:
    grader = tmp_path / "says.py"
    grader.write_text(
        "from agentrl.rm_hub import Grade\n"
        "def says(response, label, metadata):\n    return Grade(1.0, True, metadata.get('reader'))\n"
    )
    rows: list[Mapping[str, object]] = [{"response": "a"}, {"response": "a", "metadata": {"reader": "strict"}}]
    path, out = jsonl(tmp_path / "a.jsonl", rows), tmp_path / "r.jsonl"
    for flags, said in (([], [None, "strict"]), (["--reader", "lenient"], ["lenient", "strict"])):
        own = ["--rm-type", f"{grader}:says", "--grader-processes", "1"]
        assert run(["grade", *own, path, "--out", str(out), *flags]) == 0
        assert [json.loads(line)["extracted"] for line in out.read_text().splitlines()] == said


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    nightly(
        [
            (["--response-key", "txt"], "line 1: no field 'txt'; its fields are text, out, gold"),
            (["--response-key", "out"], "field 'out' is an object, expected text"),
            (["--response-key", "text"], "line 1: no field 'label'"),
            (["--response-key", "text", "--label-key", "golf"], "no field 'golf'"),
            (
                ["--response-key", "text", "--label-key", "gold", "--metadata-key", "text"],
                "is a string, expected an object",
            ),
        ],
        2,
    ),
)
def test_fields_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    row = {"text": "a", "out": {"text": "a"}, "gold": "a"}
    error = error_of(capsys, jsonl(tmp_path / "a.jsonl", [row, row]), *arguments)
    assert message in error
    assert error.removeprefix("grading\n").count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    nightly(
        [
            ('{"response"\n{"response": "a", "label": "a"}', "line 1: malformed JSON"),
            ("[1]\n", "line 1: expected a JSON object, got a list"),
            ("", "is empty"),
            ("\n\n", "is empty"),
            ("[" * 100_000, "malformed JSON"),
        ],
        2,
    ),
)
def test_files_that_are_no_jsonl(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text, encoding="utf-8")
    out = tmp_path / "r.jsonl"
    assert message in error_of(capsys, str(path), "--out", str(out), "--grader-processes", "1")
    assert not out.exists()
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_bad_row_further_down_takes_no_other_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "r.jsonl"
    path.write_text(
        '{"response": "a", "label": "a", "source": "x"}\n{"response": 1}\n{"response": "a", "lab', encoding="utf-8"
    )
    assert run(["grade", "--rm-type", "exact_match", "--grader-processes", "1", str(path), "--out", str(out)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "mean score 1.0000" in said
    assert "failed: bad_row 2" in said
    assert f"bad_row, first at {path} line 2: field 'response' is a number, expected text" in said
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["failure"], row["input"]) for row in rows] == [
        (None, {"response": "a", "label": "a", "source": "x"}),
        ("bad_row", {"response": 1}),
        ("bad_row", {}),
    ]


def test_files_that_are_not_there_or_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in error_of(capsys, str(tmp_path / "no.jsonl"))
    assert "is not a file" in error_of(capsys, str(tmp_path))
    (tmp_path / "a.csv").write_text("x")
    assert "expected .jsonl or .parquet" in error_of(capsys, str(tmp_path / "a.csv"))
    (tmp_path / "a.parquet").write_text("x")
    assert "not a readable Parquet file" in error_of(capsys, str(tmp_path / "a.parquet"))


def test_results_files_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "a.jsonl")
    assert "ends in .jsonl or .parquet" in error_of(capsys, path, "--out", "r.csv")
    assert "is the file that is read" in error_of(capsys, path, "--out", path)
    assert "does not exist" in error_of(capsys, path, "--out", str(tmp_path / "no" / "r.jsonl"))


def test_graders_and_settings_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "a.jsonl")
    assert run(["grade", "--rm-type", "exact_mach", path]) == 2
    assert "did you mean 'exact_match'" in capsys.readouterr().err
    assert run(["grade", "--rm-type", "remote_rm", path]) == 2
    assert "needs --rm-url" in capsys.readouterr().err
    assert run(["grade", "--rm-type", "f1", path, "--grader-recycle", "many"]) == 2
    assert "--grader-recycle 'many'" in capsys.readouterr().err
    assert run(["grade", path]) == 2
    assert "Missing option '--rm-type'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "grader"), [("--judge-model", "llm_judge"), ("--rm-url", "remote_rm"), ("--code-timeout", "code")]
)
def test_settings_of_another_grader(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, grader: str) -> None:
    said = error_of(capsys, jsonl(tmp_path / "a.jsonl"), *KEYS, flag, "7")
    assert f"{flag} has no effect without --rm-type {grader}; leave it out" in said


@pytest.mark.parametrize(
    ("words", "flag"), [("f1 --reader lenient", "--reader"), ("code --grader-timeout 2", "--grader-timeout")]
)
def test_settings_that_this_grader_does_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, flag: str
) -> None:
    assert run(["grade", "--rm-type", *words.split(), jsonl(tmp_path / "a.jsonl")]) == 2
    assert f"{flag} has no effect with --rm-type {words.split()[0]}" in capsys.readouterr().err


def test_help_names_the_graders_and_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["grade", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "exact_match" in text
    assert "Exit status: 0 if every answer was graded" in text


# ---- parts ----------------------------------------------------------------------------------------------------------


def test_histograms() -> None:
    few, many = Summary(), Summary()
    for score in (0.0, 1.0, 1.0):
        few.add(Grade(score, score > 0))
    assert few.histogram() == [("0", 1), ("1", 2)]
    for n in range(100):
        many.add(Grade(n / 99, False))
    bins = many.histogram()
    assert len(bins) == 10
    assert sum(count for _, count in bins) == 100
    assert bins[0][0] == "0 to 0.1"
    many.add(GraderFailure("late", kind="grader_timeout"))
    assert ("failed: grader_timeout", "1") in many.lines()
    many.add(Grade(0.0, False, unjudged="grader_timeout"))
    assert ("not judged: grader_timeout", "1") in many.lines()
    assert Summary().histogram() == []
