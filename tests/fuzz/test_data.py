"""Mutated prompt files, JSONL and Parquet, and dumps of samples."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.buffer.codec import decode_group, encode_group
from agentrl.data.source import RolloutDataSource
from agentrl.dumps import read_groups
from agentrl.groups import Group
from tests.buffer.make import make_args
from tests.fuzz.mutate import ODD, ODD_TEXTS, few, fuzz, of_bytes, of_tree
from tests.fuzz.test_samples import DICTS
from tests.fuzz.test_samples import sound as sound_sample

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
ROWS: list[dict[str, Any]] = [
    {"input": "question", "label": "4", "metadata": {"k": 1}, "tools": [TOOL]},
    {"input": CHAT, "label": 4.5, "metadata": '{"k": [1, 2]}', "tools": None},
    {"input": [*CHAT, CALL, {"role": "tool", "content": "3"}], "label": ["a", "b"], "metadata": {}, "tools": "[]"},
]
WORDS = (
    *(text.encode("utf-8", "replace") for text in ODD_TEXTS),
    b'"a": 1, "a": 2',
    b'{"input": ""}\n',
    b"\\ud800",
    b"NaN",
    b"1e999",
)


def as_jsonl(rng: random.Random) -> bytes:
    rows: Any = of_tree(rng, ROWS) if rng.random() < 0.7 else ROWS
    lines = [json.dumps(row).encode() for row in (rows if isinstance(rows, list) else [rows])]
    text = b"\n".join(lines) + b"\n"
    return of_bytes(rng, text, WORDS) if rng.random() < 0.5 else text


def as_parquet(rng: random.Random) -> bytes:
    """Write columns of odd values and types, or damaged bytes, as Parquet."""
    rows = [{"input": "x", "label": 1.5, "metadata": {"k": 1}}, {"input": "y", "label": 2.5, "metadata": {"k": 2}}] * 20
    columns: dict[str, Any] = {
        "input": pa.array([row["input"] for row in rows]),
        "label": pa.array([row["label"] for row in rows]),
        "metadata": pa.array([row["metadata"] for row in rows]),
        "unused": pa.array([math.nan] * len(rows)),
    }
    if rng.random() < 0.4:
        odd: list[Any] = [
            math.nan,
            math.inf,
            b"\xff",
            None,
            "",
            2**62,
            True,
            *(value for value in ODD if not isinstance(value, (list, dict))),
        ]
        values = [rng.choice(odd)] * len(rows)
        try:
            columns[rng.choice(list(columns))] = pa.array(values)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError):
            columns["label"] = pa.array([10**6] * len(rows)).cast(pa.timestamp("s"))
    names, arrays = list(columns), list(columns.values())
    if rng.random() < 0.1:
        names, arrays = [*names, "label"], [*arrays, arrays[0]]
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_arrays(arrays, names=names),
        sink,
        row_group_size=16,
        compression=rng.choice(("none", "snappy")),
    )
    raw = sink.getvalue().to_pybytes()
    return of_bytes(rng, raw) if rng.random() < 0.6 else raw


def sound(groups: list[Group]) -> None:
    for group in groups:
        for sample in group:
            assert sample.prompt
            sample.validate()
        assert decode_group(encode_group(group)) == group


@few
@pytest.mark.parametrize(("name", "make"), [("p.jsonl", as_jsonl), ("p.parquet", as_parquet)])
def test_mutated_prompts(tmp_path: Path, count: int, name: str, make: Any) -> None:
    def read(mutant: bytes) -> list[Group]:
        (tmp_path / name).write_bytes(mutant)
        args = make_args(tmp_path / name, label_key="label", num_epoch=1)
        return RolloutDataSource(args).get_samples(100)

    assert fuzz(count, make, read, sound)["accepted"] > count // 50


@few
def test_mutated_dumps(tmp_path: Path, count: int) -> None:
    def make(rng: random.Random) -> bytes:
        lines = [orjson.dumps(DICTS), orjson.dumps(DICTS[0])]
        try:
            lines[rng.randrange(2)] = orjson.dumps(of_tree(rng, DICTS))
        except TypeError:
            return of_bytes(rng, b"\n".join(lines), WORDS)
        return b"\n".join(lines)

    def read(mutant: bytes) -> list[Group]:
        (tmp_path / "0.jsonl").write_bytes(mutant)
        return read_groups(tmp_path / "0.jsonl")

    def accept(groups: list[Group]) -> None:
        for group in groups:
            for sample in group:
                sound_sample(sample)

    assert fuzz(count, make, read, accept)["accepted"] > count // 50
