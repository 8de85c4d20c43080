"""Sequences that a grammar constrains: the allowed tokens, and their reported log-probs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex

from agentrl.engine.embedded.grammar import Grammars, strict
from agentrl.engine.embedded.model import Vocabulary, read_config
from agentrl.engine.embedded.request import parse_generate
from agentrl.engine.embedded.sequence import SequenceState
from agentrl.serving.http import RequestError
from tests.engine.embedded.driver import make_engine, make_job, run

PATTERN = "(The|quick )+ 1?2"
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<tool_call>f:", "schema": {"enum": [1, 2]}, "end": "</tool_call>"}],
    "triggers": ["<tool_call>"],
}


@pytest.fixture(scope="module")
def vocab(folder: Callable[..., Path]) -> Vocabulary:
    return Vocabulary(str(folder()), read_config(str(folder())))


@pytest.fixture(scope="module")
def grammars(vocab: Vocabulary) -> Grammars:
    return Grammars(vocab)


def held(grammars: Grammars, vocab: Vocabulary, **params: Any) -> SequenceState:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 60, "sampling_seed": 1, **params}}
    (job,) = parse_generate({**body, "return_logprob": True, "top_logprobs_num": 3}, vocab, 512).jobs
    job.grammar = grammars.compiled(*job.params.grammar) if job.params.grammar else None
    return job


def text(job: SequenceState, vocab: Vocabulary) -> str:
    assert job.finish is not None
    assert job.finish["type"] == "stop", job.finish
    return vocab.decode(job.output[:-1], False)


def test_each_kind_of_grammar_holds(folder: Callable[..., Path], grammars: Grammars, vocab: Vocabulary) -> None:
    engine = make_engine(folder())
    kinds = {
        "regex": PATTERN,
        "json_schema": json.dumps({"type": "array", "items": {"enum": [None, 3]}, "minItems": 1, "maxItems": 2}),
        "regex ": "<tool_call>[ab]",
        "ebnf": 'root ::= word " " word\nword ::= "yes" | "no"',
    }
    jobs = {kind: held(grammars, vocab, **{kind.strip(): source}) for kind, source in kinds.items()}
    free, alone = make_job([5, 6, 7], seed=4), make_job([5, 6, 7], seed=4)
    run(engine, *jobs.values(), free)
    run(engine, alone)
    assert regex.fullmatch(PATTERN, text(jobs["regex"], vocab))
    assert text(jobs["regex "], vocab) in ("<tool_call>a", "<tool_call>b"), "a control token's text, letter by letter"
    assert json.loads(text(jobs["json_schema"], vocab)) in ([None], [3], [None, None], [None, 3], [3, None], [3, 3])
    assert text(jobs["ebnf"], vocab) in ("yes yes", "yes no", "no yes", "no no")
    assert free.output == alone.output, "others in the batch are free"


def test_log_probs_are_those_among_what_is_allowed(
    folder: Callable[..., Path], plain_model: Callable[..., Any], grammars: Grammars, vocab: Vocabulary
) -> None:
    import torch

    pattern = "[a-zA-Z ]{3,9}[0-9]"
    job = held(grammars, vocab, regex=pattern, temperature=0.7, ignore_eos=True)
    run(make_engine(folder()), job)
    with torch.inference_mode():
        logits = plain_model()(torch.tensor([job.prompt + job.output])).logits[0, len(job.prompt) - 1 :] / 0.7
    whole = regex.compile(pattern)
    for i, token in enumerate(job.output):
        before = vocab.decode(job.output[:i], False)
        allowed = [
            i
            for i in range(vocab.size)
            if (i in vocab.eos and whole.fullmatch(before))
            or (i > 9 and whole.fullmatch(before + vocab.decode([i], False), partial=True))
        ]
        row = torch.full_like(logits[i], float("-inf"))
        row[allowed] = logits[i][allowed]
        expected = row.log_softmax(-1)
        assert job.log_probs[i] == pytest.approx(float(expected[token]), abs=1e-4)
        assert {other for _, other in job.output_top[i]} <= set(allowed)
    assert job.output[-1] in vocab.eos, "the grammar's end ends, with ignore_eos too"


def test_a_structural_tag_leaves_text_free_up_to_its_trigger(grammars: Grammars, vocab: Vocabulary) -> None:
    job = held(grammars, vocab, structural_tag=json.dumps(TAG))
    assert job.grammar is not None
    written = vocab.encode("so <tool_call>f:1</tool_call> and", 99)
    assert job.grammar.advance(written) is None
    job = held(grammars, vocab, structural_tag=json.dumps(TAG))
    assert job.grammar is not None
    assert (job.grammar.advance(vocab.encode("so <tool_call>g", 99)) or {})["status_code"] == 400


def test_an_unread_retraction_goes_on_where_it_was(
    folder: Callable[..., Path], grammars: Grammars, vocab: Vocabulary
) -> None:
    engine, job = make_engine(folder()), held(grammars, vocab, regex=PATTERN)
    engine.add(job)
    while len(job.output) < 3:
        engine.step()
    engine.pause("retract")
    engine.resume()
    run(engine)
    assert regex.fullmatch(PATTERN, text(job, vocab))


@pytest.mark.parametrize(
    "params",
    [
        {"json_schema": "{"},
        {"json_schema": '{"type": "objec"}'},
        {"json_schema": '{"$ref": "#"}'},
        {"json_schema": 3},
        {"regex": "("},
        {"regex": "(" * 5000},
        {"ebnf": "root ::= root"},
        {"ebnf": "nonsense"},
        {"structural_tag": "[]"},
        {"structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}'},
        {"structural_tag": json.dumps({**TAG, "triggers": ["<x>"]})},
        {"regex": "a", "ebnf": 'root ::= "a"'},
        {"regex": "a", "min_new_tokens": 2},
    ],
)
def test_grammars_that_cannot_be_used_are_refused(
    grammars: Grammars, vocab: Vocabulary, params: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match=r"cannot be used|Only one of|min_new_tokens must|invalid type"):
        held(grammars, vocab, **params)


def test_objects_have_no_more_than_they_name() -> None:
    inner = {"type": "object", "properties": {"x": {"const": {"properties": {}}}}}
    closed = {**inner, "additionalProperties": False}
    assert strict({"type": "array", "items": [inner]}) == {"type": "array", "items": [closed]}
    assert strict({**inner, "additionalProperties": True}) == {**inner, "additionalProperties": True}
    words = {name: inner for name in ("properties", "const", "default", "enum", "examples")}
    assert strict({"$defs": words})["$defs"] == dict.fromkeys(words, closed), "these are names here"
    assert strict({"properties": words})["properties"] == dict.fromkeys(words, closed)


A, B = ({"type": "object", "properties": {name: {"enum": [1]}}, "required": [name]} for name in "ab")
REF, DEFS = {"$ref": "#/$defs/A"}, {"$defs": {"A": A}}


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"allOf": [A, B]}, '{"a": 1, "b": 1}', '{"a": 1}'),
        ({**A, "anyOf": [B]}, '{"b": 1, "a": 1}', '{"a": 1}'),
        ({**B, **REF, **DEFS}, '{"b": 1, "a": 1}', '{"b": 1}'),
        ({"allOf": [{"allOf": [A]}, {"anyOf": [B]}]}, '{"a": 1, "b": 1}', '{"a": 1}'),
        ({"allOf": [{"properties": {"a": {"allOf": [A, B]}}}]}, '{"a": {"a": 1, "b": 1}}', '{"a": {"a": 1}}'),
        ({**A, "anyOf": [{"required": ["a"]}]}, '{"a": 1}', '{"a": 1, "b": 1}'),
        ({"anyOf": [A, B]}, '{"b": 1}', '{"a": 1, "b": 1}'),
        ({"oneOf": [A, B]}, '{"b": 1}', '{"a": 1, "b": 1}'),
        ({"allOf": [REF], "title": "A", **DEFS}, '{"a": 1}', '{"a": 1, "b": 1}'),
    ],
)
def test_schemas_that_apply_together_stay_open(
    grammars: Grammars, vocab: Vocabulary, schema: dict[str, Any], allowed: str, refused: str
) -> None:
    for text, fits in ((allowed, True), (refused, False)):
        grammar = held(grammars, vocab, json_schema=json.dumps(schema)).grammar
        assert grammar is not None
        assert (grammar.advance([*vocab.encode(text, 99), min(vocab.eos)]) is None) == fits, text
