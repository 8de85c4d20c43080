"""Wire types: what is sent, what is read, what is refused."""

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.wire import FinishReason, Generation, SamplingParams, decode_routed_experts, error_message
from agentrl.errors import EngineRejected
from tests.engine.faults import answer


def test_unset_parameters_are_left_out():
    assert SamplingParams(temperature=0.0, stop=("a",)).to_wire() == {"temperature": 0.0, "stop": ("a",)}


@given(st.lists(st.tuples(st.integers(0, 200_000), st.floats(-50, 0)), max_size=50))
def test_ids_and_log_probs_survive_json(tokens: list[tuple[int, float]]):
    wire = answer([i for i, _ in tokens], output_token_logprobs=[[p, i, None] for i, p in tokens])
    got = Generation.from_wire(json.loads(json.dumps(wire)))
    assert list(zip(got.ids, got.log_probs, strict=True)) == tokens


def test_version_spans_are_read_and_made_up_where_absent():
    assert Generation.from_wire(answer([1, 2])).weight_versions == (("1", 0, 2),)
    spans = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}]
    assert Generation.from_wire(answer([1, 2], weight_versions=spans)).weight_versions == (("a", 0, 1), ("b", 1, 2))


def test_stop_id_is_kept_with_its_reason():
    got = Generation.from_wire(answer([7, 2], finish_reason={"type": "stop", "matched": 2}))
    assert got.finish_reason == FinishReason("stop", 2)
    assert got.ids == [7, 2]


def test_an_abort_before_the_first_token_is_an_empty_answer():
    wire = answer([], finish_reason={"type": "abort", "message": "Aborted"})
    del wire["meta_info"]["output_token_logprobs"]
    assert Generation.from_wire(wire).ids == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"output_ids": [9]}, "output_ids"),
        ({"text": None}, "text"),
        ({"meta_info": 3}, "meta_info"),
        ({"meta_info": {}}, "finish_reason"),
    ],
)
def test_malformed_answers_name_the_field(change: dict[str, Any], field: str):
    with pytest.raises(EngineRejected, match=field):
        Generation.from_wire(answer([1]) | change)


@pytest.mark.parametrize(
    ("meta", "field"),
    [
        ({"output_token_logprobs": None}, "output_token_logprobs"),
        ({"output_token_logprobs": [[None, 1, None]]}, "output_token_logprobs"),
        ({"output_token_logprobs": [[-1.0]]}, "output_token_logprobs"),
        ({"finish_reason": {"type": "weird"}}, "finish_reason"),
        ({"prompt_tokens": "3"}, "prompt_tokens"),
        ({"weight_versions": [1]}, "weight_versions"),
    ],
)
def test_malformed_meta_info_names_the_field(meta: dict[str, Any], field: str):
    with pytest.raises(EngineRejected, match=field):
        Generation.from_wire(answer([1], **meta))


def test_routed_experts_round_trip():
    rows = np.arange(24, dtype="<i4").reshape(6, 2, 2)
    encoded = base64.b64encode(rows.tobytes()).decode()
    got = Generation.from_wire(answer([1], routed_experts=encoded)).routed_experts(layers=2, top_k=2)
    assert got is not None
    np.testing.assert_array_equal(got, rows)
    with pytest.raises(EngineRejected, match="routed_experts"):
        decode_routed_experts(encoded, layers=5, top_k=2)
    with pytest.raises(EngineRejected, match="base64"):
        decode_routed_experts("!", layers=2, top_k=2)


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"why"}}',
        b'{"error":"why"}',
        b'{"object":"error","message":"why","code":400}',
        b'{"detail":"why"}',
        b"why",
    ],
)
def test_every_error_form_gives_the_servers_words(body: bytes):
    assert error_message(body) == "why"
