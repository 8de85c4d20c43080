"""Every format: recorded outputs, rendered templates, damaged outputs, and the time that repetitions take."""

import json
import time
from typing import Any

import pytest

from agentrl.chat import ParsedTurn, make_parser
from tests.chat.acceptance.damage import KINDS, TAG, damaged, invented
from tests.chat.acceptance.table import (
    NAMES,
    REASONING_NAMES,
    TABLE,
    Format,
    Output,
    corpus,
    formats,
    outputs,
    parser_of,
    read,
)  # fmt: skip
from tests.chat.acceptance.templates import CASES, rendered
from tests.support.nightly import nightly

LOOSE = ("hermes", "gpt-oss")
"""Corpora in which some calls do not begin with `begins`."""
CORPORA = ("deepseek", "gemma4", "glm", "gpt-oss", "kimi", "llama", "mistral", "qwen3-hermes", "qwen3-xml")


def calls_of(turn: ParsedTurn) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in turn.tool_calls]


def same(a: Any, b: Any) -> bool:
    """Compare as JSON: `3` is not "3", `true` is not `1`, but `1.0` is `1`."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def wrong(turn: ParsedTurn, output: Output) -> str:
    """Describe the first part of a turn that was read wrongly; "" if it is exact."""
    if not same(calls_of(turn), output.calls or []):
        return f"calls {calls_of(turn)}"
    if output.calls is None:
        return ""
    if (turn.reasoning or "").strip() != output.reasoning.strip():
        return f"reasoning {turn.reasoning!r}"
    if turn.content.strip() != output.content.strip():
        return f"content {turn.content!r}"
    return f"broken {turn.broken}" if output.complete and turn.broken else ""


@pytest.mark.parametrize("row", formats())
def test_at_least_99_of_100_recorded_outputs_are_exact(row: Format) -> None:
    found = {output.id: wrong(read(row, output), output) for output in outputs(row)}
    misses = {name: what for name, what in found.items() if what}
    exact = 1 - len(misses) / len(found)
    assert exact >= 0.99, f"{row.parser}: {exact:.3f} of {len(found)} exact, not {misses}"


def test_the_table_has_every_fixture_once() -> None:
    every = [raw["id"] for name in CORPORA for raw, _ in corpus(name)]
    asked = [output.id for row in TABLE if row.corpus for output in outputs(row)]
    assert sorted(asked) == sorted(every)
    assert len(every) == 469


@pytest.mark.parametrize("row", formats([row for row in TABLE if row.templates]))
def test_what_templates_write_is_read_back(row: Format) -> None:
    """Read by the format's name, and by the template's own text ("auto")."""
    for name in row.templates:
        done = 0
        for case in CASES:
            output = rendered(name, row.tags, case)
            if output is None:
                continue
            done += 1
            template = output.id
            for parser in (parser_of(row), make_parser("auto", "auto", template)):
                opened = output.prompt.rfind(row.tags[0]) > output.prompt.rfind(row.tags[1])
                turn = parser.opened(opened).parse(output.text, output.tools)
                assert wrong(turn, output) == "", f"{name}, {case}: {output.text!r}"
        assert done, f"{name} writes no case"


@pytest.mark.parametrize("row", nightly(formats(), 9))
def test_of_damaged_outputs_nothing_is_invented(row: Format) -> None:
    """For 200 of them nothing raises, and each call that is read is one that the model wrote."""
    found = list(damaged(row, outputs(row)))
    assert len(found) == 200
    misses = []
    for case in found:
        turn = read(row, case.output, case.text)
        json.dumps([turn.content, turn.reasoning, turn.broken, [call.arguments for call in turn.tool_calls]])
        misses += [(case.kind, case.output.id, case.text[-400:], call) for call in invented(case, calls_of(turn))]
    assert not misses, f"{len(misses)} calls invented, first {misses[:3]}"


@pytest.mark.parametrize("row", formats([row for row in TABLE if row.begins]))
def test_a_call_that_was_cut_is_reported(row: Format) -> None:
    """A turn that is cut after the begin of its first call, and before a call can be read, has a broken call."""
    done = 0
    for output in outputs(row):
        start = output.text.find(row.begins) + len(row.begins)
        talk = output.reasoning + output.content
        if not output.calls or not output.complete or row.begins in talk or start < len(row.begins):
            continue
        for cut in range(start, len(output.text), max(1, len(output.text) // 12)):
            turn = read(row, output, output.text[:cut])
            assert turn.tool_calls or turn.broken, f"{output.id}: {output.text[:cut]!r}"
            done += 1
    assert done >= 8


@pytest.mark.timeout(120)
@pytest.mark.parametrize("row", nightly(formats(), 9))
def test_repetitions_take_linear_time(row: Format) -> None:
    """A collapsing policy repeats a piece of a call until the limit. Eight times the text may take 20 times as long."""
    examples = [output for output in outputs(row) if output.calls][:3]
    pieces = {tag for output in examples for tag in TAG.findall(output.text)} or {'{"name":', "[f(", "f(a='"}
    for piece in [*sorted(pieces)[:8], examples[0].text, "{", '"', "[", "\n"]:
        for opening in ("", examples[0].text[: len(examples[0].text) // 2]):
            text, parser = opening + piece * (4000 // len(piece)), parser_of(row)
            short = _seconds(parser.parse, text)
            long = _seconds(parser.parse, opening + piece * (32000 // len(piece)))
            assert long < max(20 * short, 0.1), f"{piece!r} after {opening!r}: {short:.4f} s, then {long:.4f} s"


def _seconds(parse: Any, text: str) -> float:
    start = time.process_time()
    parse(text)
    return time.process_time() - start


@pytest.mark.parametrize("name", NAMES)
def test_names_of_sglang_are_known(name: str) -> None:
    make_parser(name, "none", "")


def test_more_names_of_sglang_are_known() -> None:
    """Step 3.5 writes what Qwen3-Coder writes; the other names are for reasoning tags."""
    make_parser("step3p5", "none", "")
    for name in REASONING_NAMES:
        make_parser("none", name, "")


def test_the_data_is_whole() -> None:
    """Every format has outputs, and each damaged output has the intended damage."""
    for row in TABLE:
        every = outputs(row)
        calls = [call for output in every for call in output.calls or []]
        assert len(every) >= 2
        assert len(calls) >= 2
        assert all(row.begins in output.text for output in every if output.calls and row.parser not in LOOSE)
        found = list(damaged(row, every))
        assert found == list(damaged(row, every))
        assert {case.kind for case in found} == set(KINDS)
        assert sum(case.text != case.output.text for case in found) >= 198
        assert sum(invented(case, case.output.calls or []) != [] for case in found) == 0
        for name in row.templates:
            assert any(rendered(name, row.tags, case) for case in CASES), name
