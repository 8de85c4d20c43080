"""Mutated answers of an engine: recorded ones of SGLang, and one of every accepted shape."""

from __future__ import annotations

import random
from typing import Any

import orjson

from agentrl.buffer.codec import decode_group, encode_group
from agentrl.engine.answers import RequestExpectations, parse
from agentrl.engine.wire import Generation
from agentrl.sample import Sample
from tests.conformance.sglang.replay import recording
from tests.engine.faults import answer
from tests.engine.test_wire import RECORDED, spans
from tests.fuzz.mutate import counts, fuzz, of_bytes, of_tree

Answer = tuple[bytes, RequestExpectations]
OUR_SHAPES = (
    (
        answer([1, 2], weight_versions=spans(("a", 0, 1), ("b", 1, 2)), completion_tokens=2),
        RequestExpectations(3, 4, 512),
    ),
    (
        answer([7, 2], spec_verify_ct=1, spec_accept_token_num=1, finish_reason={"type": "stop", "matched": 2}),
        RequestExpectations(3),
    ),
    (
        answer([], finish_reason={"type": "abort", "message": "Aborted", "status_code": None}),
        RequestExpectations(3, 4, 512),
    ),
)


def shapes() -> list[tuple[dict[str, Any], RequestExpectations]]:
    found = list(OUR_SHAPES)
    for name in RECORDED:
        exchange = recording(name)
        body = exchange["request"]["body"]
        asked = RequestExpectations(len(body["input_ids"]), body["sampling_params"].get("max_new_tokens"), 512)
        found.append((exchange["response"]["json"], asked))
    return found


SHAPES = shapes()


def mutant(rng: random.Random) -> Answer:
    tree, asked = rng.choice(SHAPES)
    changed = of_tree(rng, tree)
    try:
        raw = orjson.dumps(changed)
    except TypeError:  # values that JSON cannot hold never arrive over a wire
        raw = orjson.dumps(tree)
    return (of_bytes(rng, raw) if rng.random() < 0.3 else raw), asked


def read(given: Answer) -> tuple[Generation, RequestExpectations]:
    return parse(*given), given[1]


def sound(read: tuple[Generation, RequestExpectations]) -> None:
    got, asked = read
    assert type(got.cached_tokens) is int
    assert got.prompt_tokens == asked.prompt_tokens
    sample = Sample(index=1)
    sample.set_prompt_tokens([5] * max(1, asked.prompt_tokens))
    sample.append_model(got.ids, got.log_probs, got.weight_versions, text=got.text, turn=1)
    sample.spec_info.add(got.meta_info)
    sample.validate()
    (back,) = decode_group(encode_group([sample]))
    assert (back.tokens, back.segments, back.response) == (sample.tokens, sample.segments, sample.response)


@counts
def test_mutated_answers(count: int) -> None:
    assert fuzz(count, mutant, read, sound)["accepted"] > count // 50
