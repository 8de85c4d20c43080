"""Sequences that are held to a grammar: what they may say, and the log-probs that are reported of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex

from agentrl.chat.render_turn import render_turn
from agentrl.engine.embedded.grammar import Grammars, strict
from agentrl.engine.embedded.model import Vocabulary, read_config
from agentrl.engine.embedded.request import parse_generate
from agentrl.engine.embedded.sequence import SequenceState
from agentrl.engine.embedded.structured_output import chosen, required_output
from agentrl.serving.http import RequestError
from tests.engine.embedded.driver import make_engine, make_job, run
from tests.support.chats import make_chat

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


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think", "glm4moe", "llama3_1", "deepseekv3", "gptoss"])
def test_forced_calls_are_those_that_templates_write(grammars: Grammars, vocab: Vocabulary, template: str) -> None:
    chat = make_chat(template)
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        "required": ["a"],
    }
    tools = [
        {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}
        for name in ("f", "g")
    ]
    functions = [{"name": "g", "arguments": {"a": 1, "b": "x <y>\n"}}, {"name": "f", "arguments": {"a": 2}}]
    calls = [{"id": f"call0000{i}", "type": "function", "function": one} for i, one in enumerate(functions)]
    calls = calls[:1] if template in ("llama3_1", "gptoss") else calls
    text = render_turn(chat, {"role": "assistant", "content": "", "tool_calls": calls}, tools)
    for choice, single, allowed in (("required", False, True), ({"function": {"name": "f"}}, True, False)):
        body = {"tool_choice": choice, "parallel_tool_calls": not single}
        job = held(grammars, vocab, **required_output(chat, grammars, body, chosen(tools, choice)))
        assert job.grammar is not None
        reason = job.grammar.advance(vocab.encode(text, 400))
        assert (reason is None) == allowed, reason


def test_what_cannot_be_forced_is_refused_by_name(grammars: Grammars) -> None:
    with pytest.raises(RequestError, match=r"lfm2.*cannot be forced"):
        required_output(make_chat("lfm2_v2"), grammars, {"tool_choice": "required"}, [{"function": {"name": "f"}}])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("qwen3", '<think>\nso\n</think>\n\n{"ok": true}'),
        ("qwen2_5", '{"ok": true}'),
        ("gptoss", '<|channel|>final<|message|>{"ok": true}'),
    ],
)
def test_answers_stand_where_the_template_has_them(
    grammars: Grammars, vocab: Vocabulary, template: str, text: str
) -> None:
    schema = {"properties": {"ok": {"type": "boolean"}}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    job = held(grammars, vocab, **required_output(make_chat(template), grammars, {"response_format": form}, []))
    assert job.grammar is not None
    assert job.grammar.advance(vocab.encode(text, 99)) is None
    assert make_chat(template).parse(text).content == '{"ok": true}'


def test_a_model_without_calls_of_its_own_writes_sglangs(grammars: Grammars, vocab: Vocabulary) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    job = held(grammars, vocab, **required_output(make_chat("gemma3"), grammars, {"tool_choice": "required"}, tools))
    assert job.grammar is not None
    listed = [{"name": "g", "parameters": {"a": 1}}, {"name": "f", "parameters": {}}]
    assert job.grammar.advance(vocab.encode(json.dumps(listed), 99)) is None
