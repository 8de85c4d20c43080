"""Wire types: requests, answers, and refused values."""

import base64
import json
import math
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.answers import RequestExpectations, error_message, read
from agentrl.engine.wire import FinishReason, Generation, SamplingParams, encode, join
from agentrl.errors import EngineRejected
from tests.conformance.sglang.replay import names, recording
from tests.engine.faults import answer

ASKED = RequestExpectations(prompt_tokens=3, max_new_tokens=4, vocab_size=512)


def is_whole_answer(name: str) -> bool:
    """Return true if the answer is to one prompt of known ids, with log-probs; the recordings shorten long answers."""
    exchange = recording(name)
    body, answered = exchange["request"]["body"], exchange["response"]["json"]
    if not (isinstance(body, dict) and isinstance(answered, dict) and "output_ids" in answered):
        return False
    meta = answered["meta_info"]
    known = "input_ids" in body and "output_token_logprobs" in meta
    return known and len(answered["output_ids"]) == meta["completion_tokens"]


RECORDED = [name for name in names("") if is_whole_answer(name)]


def spans(*parts: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in parts]


def test_unset_parameters_are_left_out() -> None:
    assert SamplingParams(temperature=0.0, stop=("a",)).to_wire() == {"temperature": 0.0, "stop": ("a",)}


@given(st.lists(st.tuples(st.integers(0, 200_000), st.floats(-50, 0)), min_size=1, max_size=50))
def test_ids_and_log_probs_survive_json(tokens: list[tuple[int, float]]) -> None:
    wire = answer([i for i, _ in tokens], output_token_logprobs=[[p, i, None] for i, p in tokens])
    got = read(json.loads(json.dumps(wire)), RequestExpectations(3))
    assert list(zip(got.ids, got.log_probs, strict=True)) == tokens


@pytest.mark.parametrize("kind", ["i", "l", "q"])
def test_a_prompt_may_be_an_array(kind: str) -> None:
    assert encode(array(kind, [0, 7, 99]), 100) == encode(array(kind, [0, 7, 99]), None) == b"[0,7,99]"
    for wrong in (100, -1):
        with pytest.raises(EngineRejected, match=f"prompt token 1 is {wrong}"):
            encode(array(kind, [5, wrong]), 100)
    with pytest.raises(EngineRejected, match="empty"):
        encode(array(kind), 100)


def test_a_prompt_is_checked_and_the_error_names_the_position() -> None:
    assert json.loads(encode([1, 2, 31], 32)) == [1, 2, 31]
    assert json.loads(encode([40], None)) == [40]
    wrong: list[tuple[list[Any], str]] = [
        ([1, 99, 3], "token 1 is 99; expected whole numbers from 0 to 31"),
        ([1, -2], "token 1 is -2"),
        ([1, True], "token 1 is True"),
        ([1.0], "token 0 is 1.0"),
        ([b""], "not a token id"),
        ([], "empty"),
    ]
    for ids, said in wrong:
        with pytest.raises(EngineRejected, match=said):
            encode(ids, 32)


def test_version_spans_are_read_and_made_up_where_absent() -> None:
    assert read(answer([1, 2]), ASKED).weight_versions == (("1", 0, 2),)
    found = spans(("a", 0, 0), ("a", 0, 1), ("b", 1, 2))
    assert read(answer([1, 2], weight_versions=found), ASKED).weight_versions == (
        ("a", 0, 1),
        ("b", 1, 2),
    )


def test_a_count_that_is_not_known_is_null_or_absent() -> None:
    assert read(answer([1], cached_tokens=None, spec_verify_ct=None), ASKED).cached_tokens == 0


def test_stop_id_is_kept_with_its_reason() -> None:
    got = read(answer([7, 2], finish_reason={"type": "stop", "matched": 2}), ASKED)
    assert got.finish_reason == FinishReason("stop", 2)
    assert got.ids == [7, 2]


def test_an_abort_before_the_first_token_is_an_empty_answer() -> None:
    wire = answer([], finish_reason={"type": "abort", "message": "Aborted"})
    del wire["meta_info"]["output_token_logprobs"]
    assert read(wire, ASKED).ids == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"output_ids": [9]}, "output_ids"),
        ({"text": None}, "text"),
        ({"meta_info": 3}, "meta_info"),
        ({"meta_info": {}}, "finish_reason"),
    ],
)
def test_malformed_answers_name_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(EngineRejected, match=field):
        read(answer([1]) | change, ASKED)


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
def test_malformed_meta_info_names_the_field(meta: dict[str, Any], field: str) -> None:
    with pytest.raises(EngineRejected, match=field):
        read(answer([1], **meta), ASKED)


@pytest.mark.parametrize(
    ("answered", "said"),
    [
        (answer([-1]), "ids from 0, got -1"),
        (answer([1], output_token_logprobs=[[3.0, 1, None]]), "log-probs of at most 0"),
        (answer([1], output_token_logprobs=[[-1e39, 1, None]]), "log-probs of at most 0 in float32"),
        (answer([1], prompt_tokens=999), "--allow-auto-truncate"),
        (answer([1], prompt_tokens=-3), "prompt_tokens should be a whole number from 0, got -3"),
        (answer([1], prompt_tokens=3.0), "prompt_tokens should be a whole number"),
        (answer([1], cached_tokens="2"), "cached_tokens should be a whole number"),
        (answer([1], cached_tokens=[2]), "cached_tokens should be a whole number"),
        (answer([1], completion_tokens=True), "completion_tokens should be a whole number"),
        (answer([1], spec_verify_ct="x"), "spec_verify_ct should be a whole number"),
        (answer([1] * 5), "at most 4 tokens"),
        (answer([1, 2], completion_tokens=99), "completion_tokens"),
        (answer([1, 2], weight_versions=spans(("a", 0, 99))), "cover the answer's 2 tokens"),
        (answer([1, 2], weight_versions=spans(("a", 0, 1))), "cover the answer's 2 tokens"),
        (answer([1, 2], weight_versions=spans(("a", 1, 2))), "cover the answer's 2 tokens"),
        (answer([1, 2], weight_versions=spans(("a", 0, 0), ("b", 1, 2))), "cover the answer's 2 tokens"),
        (answer([1, 2], weight_versions=spans(("a", 0, 3), ("b", 3, 2))), "cover the answer's 2 tokens"),
    ],
)
def test_answers_that_contradict_themselves_or_the_request_are_refused(answered: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineRejected, match=said) as caught:
        read(answered, ASKED)
    assert caught.value.kind == "malformed_answer"


def test_an_id_that_the_model_does_not_have_is_named() -> None:
    with pytest.raises(EngineRejected, match="sampled token 512, and this pool was told of 512 ids") as caught:
        read(answer([512]), ASKED)
    assert caught.value.kind == "unknown_token"


def test_an_id_below_zero_is_refused_where_the_vocabulary_is_not_known() -> None:
    assert read(answer([10**6]), RequestExpectations(3)).ids == [10**6]
    with pytest.raises(EngineRejected, match="ids from 0, got -1"):
        read(answer([-1]), RequestExpectations(3))


def test_an_empty_answer_is_a_full_context_unless_nothing_was_asked_for() -> None:
    with pytest.raises(EngineRejected, match="context is full") as caught:
        read(answer([]), ASKED)
    assert caught.value.kind == "context_overflow"
    assert read(answer([]), RequestExpectations(3, max_new_tokens=0)).ids == []


SCORED = RequestExpectations(prompt_tokens=3, max_new_tokens=0, scored=(7, 8))


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (None, "a list with one"),
        ([], "the ids of the prompt's last 2 tokens"),
        ([[None, 6, None], [-1.0, 7, None]], "the ids of the prompt's last 2 tokens"),
        ([[None, 6, None], [-1.0, 7, None], [-1.0, 9, None]], "the ids of the prompt's last 2 tokens"),
        ([[None, 6, None], [-1.0, 7, None], [None, 8, None]], "numbers as log-probs"),  # SGLang writes NaN like this
        ([[None, 6, None], [-1.0, 7, None], ["x", 8, None]], "numbers as log-probs"),
        ([[None, 6, None], [-1.0, 7, None], [0.3, 8, None]], "at most 0"),
        ([[None, 6, None], [-1.0, 7, None], [-1e39, 8, None]], "at most 0"),
        ([[None, 6, None], [-1.0], [-1.0, 8, None]], "a list with one"),
    ],
)
def test_log_probs_of_a_prompt_must_be_those_of_the_tokens_asked_for(scores: Any, said: str) -> None:
    with pytest.raises(EngineRejected, match=said) as caught:
        read(answer([], input_token_logprobs=scores), SCORED)
    assert "input_token_logprobs" in str(caught.value)


def test_log_probs_of_a_prompt_are_read() -> None:
    scores = [[None, 6, None], [-1.5, 7, None], [-0.25, 8, None]]
    got = read(answer([], input_token_logprobs=scores), SCORED)
    assert got.prompt_log_probs == [-1.5, -0.25]
    assert "input_token_logprobs" not in got.meta_info


def test_rounding_above_zero_is_no_contradiction() -> None:
    assert read(answer([1], output_token_logprobs=[[4e-6, 1, None]]), ASKED).log_probs == [4e-6]


@pytest.mark.parametrize(("status", "kind"), [(500, "engine_error"), (400, "engine_rejected")])
def test_an_abort_that_carries_an_error_is_that_error(status: int, kind: str) -> None:
    finish = {"type": "abort", "message": "it broke", "status_code": status, "err_type": None}
    with pytest.raises(EngineRejected, match="it broke") as caught:
        read(answer([1], finish_reason=finish), ASKED)
    assert (caught.value.status, caught.value.kind) == (status, kind)


def test_an_abort_in_the_queue_says_neither_prompt_nor_version() -> None:
    wire = answer([], finish_reason={"type": "abort", "message": "Abort in waiting queue"}, completion_tokens=0)
    del wire["meta_info"]["prompt_tokens"], wire["meta_info"]["weight_version"], wire["meta_info"]["cached_tokens"]
    got = read(wire, ASKED)
    assert (got.ids, got.prompt_tokens, got.weight_versions) == ([], 3, ())


@pytest.mark.parametrize("name", RECORDED)
def test_what_the_real_server_answered_is_accepted(name: str) -> None:
    exchange = recording(name)
    body, answered = exchange["request"]["body"], exchange["response"]["json"]
    asked = RequestExpectations(len(body["input_ids"]), body["sampling_params"].get("max_new_tokens"), vocab_size=512)
    ids = list(answered["output_ids"])
    assert read(answered, asked).ids == ids


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
def test_every_error_form_gives_the_servers_words(body: bytes) -> None:
    assert error_message(body) == "why"


# ---- answers in parts --------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.tuples(st.sampled_from(["1", "2", "3"]), st.integers(1, 4)), max_size=3), max_size=5))
def test_parts_join_to_one_answer_whose_every_token_keeps_its_version(shape: list[list[tuple[str, int]]]) -> None:
    parts, versions = [], []
    for number, runs in enumerate(shape):
        spans, length = [], 0
        for version, count in runs:
            spans.append((version, length, length + count))
            versions += [version] * count
            length += count
        ids = [100 * number + i for i in range(length)]
        parts.append(
            Generation(
                ids=ids,
                log_probs=[-float(id_) for id_ in ids],
                text=f"<{number}>",
                finish_reason=FinishReason("abort" if number < len(shape) - 1 else "stop", None),
                weight_version=str(number),
                weight_versions=tuple(spans),
                prompt_tokens=7 + number,
                cached_tokens=number,
                meta_info={"completion_tokens": length, "id": str(number)},
            )
        )
    got = join(parts, 7)
    assert got.ids == [id_ for part in parts for id_ in part.ids]
    assert got.log_probs == [-float(id_) for id_ in got.ids]
    assert got.text == "".join(part.text for part in parts)
    assert (got.prompt_tokens, got.cached_tokens) == (7, 0)
    assert [version for version, start, end in got.weight_versions for _ in range(start, end)] == versions
    ends = [0, *(end for _, _, end in got.weight_versions)]
    assert [start for _, start, _ in got.weight_versions] == ends[:-1]
    assert got.finish_reason.type == ("stop" if parts else "abort")
    if parts:
        assert got.weight_version == parts[-1].weight_version
        assert got.meta_info == {"completion_tokens": len(got.ids), "id": str(len(parts) - 1)}


def test_what_is_asked_for_after_some_tokens() -> None:
    params = SamplingParams(temperature=0.5, max_new_tokens=8, min_new_tokens=2, sampling_seed=5)
    assert params.after(0) is params
    later = params.after(3)
    assert (later.temperature, later.max_new_tokens, later.min_new_tokens) == (0.5, 5, 0)
    assert later.sampling_seed not in (None, 5)
    assert SamplingParams().after(3) == SamplingParams()


KEPT = {"output_token_sampling_mask": [[1, 9], [2]], "output_token_sampling_logprobs": [-0.25, 0.0]}


def test_kept_sets_are_read_with_the_log_probs_among_them() -> None:
    asked = replace(ASKED, kept=True)
    got = read(answer([1, 2], **KEPT), asked)
    assert ([list(row) for row in got.kept or ()], got.log_probs) == ([[1, 9], [2]], [-0.25, 0.0])
    assert not got.meta_info.keys() & KEPT.keys()
    assert read(answer([1, 2], **KEPT), ASKED).kept is None
    nothing = read(answer([], finish_reason={"type": "abort"}), asked)
    whole = join([got, nothing, got], 3)
    assert nothing.kept == []
    assert [list(row) for row in whole.kept or ()] == [[1, 9], [2], [1, 9], [2]]


def test_the_kept_sets_of_a_real_server_are_read() -> None:
    recorded = recording("generate_sampling_mask")["response"]["json"]
    full = [[-1.0, id_, None] for id_ in recorded["output_ids"]]  # the request had no log-probs
    recorded["meta_info"] |= {"output_token_logprobs": full}
    got = read(recorded, RequestExpectations(8, 5, 512, kept=True))
    assert list(map(len, got.kept or ())) == [3] * 5
    assert max(got.log_probs) < 0 > min(got.log_probs) > math.log(0.2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"output_token_sampling_mask": None}, "--allow-truncated-sampling"),
        ({"output_token_sampling_logprobs": None}, "--allow-truncated-sampling"),
        ({"output_token_sampling_mask": [[1]]}, "kept ids of each of 2 tokens"),
        ({"output_token_sampling_mask": 3}, "kept ids of each of 2 tokens"),
        ({"output_token_sampling_mask": [[1, "a"], [2]]}, "kept ids of each of 2 tokens"),
        ({"output_token_sampling_mask": [[1, 2**40], [2]]}, "kept ids of each of 2 tokens"),
        ({"output_token_sampling_mask": [[9], [2]]}, "sampled one, 1, among them"),
        ({"output_token_sampling_mask": [[1], []]}, "sampled one, 2, among them"),
        ({"output_token_sampling_mask": [[1, 512], [2]]}, "ids of the model"),
        ({"output_token_sampling_mask": [[1, -1], [2]]}, "ids of the model"),
        ({"output_token_sampling_logprobs": [-0.25]}, "as many output_token_sampling_logprobs"),
        ({"output_token_sampling_logprobs": [-0.25, None]}, "numbers as log-probs"),
        ({"output_token_sampling_logprobs": [-0.25, 3.0]}, "log-probs of at most 0"),
    ],
)
def test_kept_sets_that_are_missing_or_contradict_the_answer_are_refused(changes: dict[str, Any], said: str) -> None:
    meta = {name: value for name, value in (KEPT | changes).items() if value is not None}
    with pytest.raises(EngineRejected, match=said) as error:
        read(answer([1, 2], **meta), replace(ASKED, kept=True))
    assert error.value.kind == ("no_sampling_mask" if len(meta) < 2 else "malformed_answer")


def routed_answer(rows: list[list[int]] | None, count: int = 2, **finish: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop", "matched": 2, **finish},
        "output_token_logprobs": [[-0.5, 7, None]] * count,
    }
    if rows is not None:
        meta["routed_experts"] = base64.b64encode(np.array(rows, "<i4").tobytes()).decode()
    return {"text": "", "output_ids": [7] * count, "meta_info": meta}


def test_experts_are_read_from_the_token_that_was_asked_for() -> None:
    rows = [[0, 300], [5, 1], [2, 3]]
    got = read(routed_answer(rows), RequestExpectations(4, routed_from=2))
    assert got.routed is not None
    assert got.routed.tolist() == rows
    more = read(routed_answer([[9, 9]], 1), RequestExpectations(6, routed_from=5))
    none = read(routed_answer(None, 1, type="abort"), RequestExpectations(6, routed_from=5))
    joined = join([got, none, more], 4).routed
    assert joined is not None
    assert joined.tolist() == [*rows, [9, 9]]
    assert read(routed_answer(rows), RequestExpectations(4)).routed is None


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, "start SGLang with --enable-return-routed-experts"),
        ([[0, 1], [1, 2]], "numbers of experts, as many for each of 3 tokens"),
        ([[], [], []], "numbers of experts"),
        ([[0, 1], [1, 2], [0, -1]], "numbers of experts"),
        ([[0, 1], [1, 2], [0, 1 << 16]], "numbers of experts"),
    ],
)
def test_experts_that_are_missing_or_none_are_refused(rows: list[list[int]] | None, said: str) -> None:
    with pytest.raises(EngineRejected, match=said):
        read(routed_answer(rows), RequestExpectations(4, routed_from=2))


@pytest.mark.parametrize("text", [7, "not base64!", "AAA", "AAAA"])
def test_experts_that_cannot_be_decoded_are_refused(text: Any) -> None:
    answer = routed_answer([])
    answer["meta_info"]["routed_experts"] = text
    with pytest.raises(EngineRejected, match=r"meta_info\.routed_experts"):
        read(answer, RequestExpectations(4, routed_from=2))
