"""The sample record: growing, checking, carrying."""

import copy
from array import array
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Sample
from agentrl.buffer.codec import decode_group, encode_group
from agentrl.errors import SampleError
from agentrl.sample import Origin, Segment, SpecInfo, Status

token = st.integers(0, 200_000)
log_prob = st.floats(-50, 0, allow_nan=False, width=32)
part = st.one_of(
    st.tuples(st.just(Origin.MODEL), st.lists(st.tuples(token, log_prob), max_size=8)),
    st.tuples(st.sampled_from([Origin.ENV, Origin.CLOSE]), st.lists(st.tuples(token, st.just(0.0)), max_size=8)),
)

Part = tuple[Origin, list[tuple[int, float]]]


def grow(prompt: list[int], parts: list[Part], *, truncated: bool = False) -> Sample:
    sample = Sample(group_index=1, index=2, label="x", metadata={"a": [1, {"b": None}]})
    sample.set_prompt_tokens(prompt)
    for turn, (origin, pairs) in enumerate(parts):
        ids = [i for i, _ in pairs]
        if origin is Origin.MODEL:
            kept = [[i, *range(i % 3)] for i in ids] if truncated else None
            sample.append_model(ids, [p for _, p in pairs], str(turn), text="m", turn=turn, kept=kept)
        else:
            sample.append_observation(ids, text="o", turn=turn, origin=origin)
    return sample


@given(st.lists(token, min_size=1, max_size=5), st.lists(part, max_size=6))
def test_the_mask_is_one_exactly_on_model_tokens(prompt: list[int], parts: list[Part]) -> None:
    sample = grow(prompt, parts).validate()
    expected_mask = [int(origin is Origin.MODEL) for origin, pairs in parts for _ in pairs]
    assert sample.tokens == prompt + [i for _, pairs in parts for i, _ in pairs]
    assert sample.loss_mask == expected_mask
    assert sample.rollout_log_probs == [p for _, pairs in parts for _, p in pairs]
    assert sample.prompt_length == len(prompt)
    written = [0] * sample.response_length
    for segment in sample.segments:
        written[segment.start : segment.end] = [int(segment.origin is Origin.MODEL)] * (segment.end - segment.start)
    assert written == expected_mask


@given(st.lists(token, min_size=1, max_size=5), st.lists(part, max_size=6), st.booleans())
def test_kept_sets_stay_with_their_tokens(prompt: list[int], parts: list[Part], later: bool) -> None:
    """Tokens of the environment, and of turns without truncated sampling, have none."""
    sample = grow(prompt, parts[: len(parts) // 2], truncated=not later)
    grown = grow(prompt, parts[len(parts) // 2 :])
    for segment in grown.segments:
        new = list(grown.tokens[grown.prompt_length :][segment.start : segment.end])
        if segment.origin is Origin.MODEL:
            sample.append_model(new, [-1.0] * len(new), kept=[[i] for i in new] if later else None)
        else:
            sample.append_observation(new)
    ids, bounds = sample.validate().rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if ids is None or bounds is None:
        return
    kept = [list(ids[a:b]) for a, b in pairwise(bounds)]
    assert len(kept) == sample.response_length
    first = grow(prompt, parts[: len(parts) // 2]).response_length
    for at, (row, id_, mask) in enumerate(zip(kept, sample.tokens[len(prompt) :], sample.loss_mask or (), strict=True)):
        want = [[id_], []] if later else [[], [id_, *range(id_ % 3)]]
        assert row == (want[at < first] if mask else [])
    sample.set_prompt_tokens([1])
    assert sample.validate().rollout_top_p_token_ids is None


@given(st.lists(token, min_size=1, max_size=5), st.lists(part, max_size=6), st.booleans())
def test_round_trips_lose_nothing(prompt: list[int], parts: list[Part], truncated: bool) -> None:
    sample = grow(prompt, parts, truncated=truncated)
    sample.status = Status.TRUNCATED if truncated else Status.COMPLETED
    sample.spec_info = SpecInfo(1, 2, 3, 4)
    assert Sample.from_dict(copy.deepcopy(sample.to_dict())) == sample
    assert Sample.from_arrays(*sample.to_arrays()) == sample


@given(st.lists(token, min_size=1, max_size=5), st.lists(part, max_size=6))
def test_a_compact_sample_reads_the_same(prompt: list[int], parts: list[Part]) -> None:
    sample, compact = grow(prompt, parts), grow(prompt, parts).compact()
    assert compact.to_dict() == sample.to_dict()
    assert Sample.from_arrays(*compact.to_arrays()) == sample
    assert sum(len(memoryview(values).tobytes()) for values in held(compact)) == 4 * len(sample.tokens) + 5 * (
        sample.response_length
    )
    for grown in (sample, compact):
        grown.append_model([7], [-0.5])
        grown.validate()
    assert compact.to_dict() == sample.to_dict()


def held(sample: Sample) -> list[Any]:
    return [sample.tokens, sample.loss_mask or array("B"), sample.rollout_log_probs or array("f")]


def test_a_teachers_log_probs_are_of_the_whole_response() -> None:
    sample = grow([1], [(Origin.MODEL, [(2, -1.0), (5, -1.0)]), (Origin.ENV, [(3, 0.0)])])
    sample.teacher_log_probs = [-0.5, -0.25, 0.0]
    assert Sample.from_arrays(*sample.validate().to_arrays()) == sample
    assert Sample.from_dict(sample.to_dict()) == sample
    grown = Sample.from_dict(sample.to_dict())
    grown.append_observation([9])
    assert grown.validate().teacher_log_probs is None, "of a longer response there are none yet"
    sample.teacher_log_probs.pop()
    with pytest.raises(SampleError, match="teacher_log_probs has 2 entries, response_length is 3"):
        sample.validate()


def test_a_sample_without_numbers_is_compact_as_it_is() -> None:
    assert Sample(prompt="x").compact().to_dict() == Sample(prompt="x").to_dict()


def test_a_turn_that_a_weight_update_interrupted_keeps_both_versions_at_their_tokens() -> None:
    sample = grow([1], [(Origin.MODEL, [(2, -1.0)]), (Origin.ENV, [(3, 0.0)])])
    sample.append_model([4, 5, 6, 7], [-0.1, -0.2, -0.3, -0.4], [("a", 0, 3), ("b", 3, 4)], text="answer", turn=2)
    sample.validate()
    assert sample.segments[2:] == [Segment(Origin.MODEL, 2, 5, 2, "a"), Segment(Origin.MODEL, 5, 6, 2, "b")]
    assert [sample.tokens[1:][s.start : s.end] for s in sample.segments] == [[2], [3], [4, 5, 6], [7]]
    assert sample.rollout_log_probs == [-1.0, 0.0, -0.1, -0.2, -0.3, -0.4]
    assert sample.loss_mask == [1, 0, 1, 1, 1, 1]
    assert sample.weight_versions == ["0", "a", "b"]
    assert sample.response == "moanswer"
    assert Sample.from_dict(sample.to_dict()) == sample


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [("a", 0, 1)],
        [("a", 0, 3)],
        [("a", 1, 2)],
        [("a", 0, 1), ("b", 0, 2)],
        [("a", 0, 2), ("b", 2, 1), ("c", 1, 2)],
        [("a", 0, 0), ("b", 0, 2)],
    ],
)
def test_versions_that_do_not_cover_the_answer_are_refused(spans: list[tuple[str, int, int]]) -> None:
    sample = Sample()
    sample.set_prompt_tokens([1])
    with pytest.raises(SampleError, match="that do not cover 2 ids one after the other"):
        sample.append_model([2, 3], [-0.1, -0.1], spans)
    assert (sample.tokens, sample.weight_versions) == ([1], [])
    sample.append_model([], [], [])
    sample.append_model([], [], [("a", 0, 0)])


def test_segments_of_samples_written_before_they_had_versions_are_read() -> None:
    assert Sample.from_dict({"segments": [["model", 0, 2, 1]]}).segments == [Segment(Origin.MODEL, 0, 2, 1)]


def test_lengths_that_disagree_are_an_error_at_once() -> None:
    sample = Sample()
    sample.set_prompt_tokens([1])
    with pytest.raises(SampleError, match="2 ids but 1 log-probs"):
        sample.append_model([1, 2], [-0.5])
    with pytest.raises(SampleError, match="2 ids but 1 kept sets"):
        sample.append_model([1, 2], [-0.5, -0.5], kept=[[1]])
    with pytest.raises(SampleError, match="log-prob nan at position 1"):
        sample.append_model([1, 2], [-0.5, float("nan")])
    assert sample.response_length == 0


def test_appending_to_a_sample_without_a_mask_is_refused() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2)
    with pytest.raises(SampleError, match="no loss_mask"):
        sample.append_model([4], [-1.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_length": 9}, "response_length is 9 but there are 5 tokens"),
        ({"response_length": 5}, "the prompt's tokens are missing"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries, response_length is 3"),
        ({"loss_mask": [1, 2, 0]}, "values other than 0 and 1"),
        ({"rollout_log_probs": [0.0]}, "rollout_log_probs has 1 entries"),
        ({"rollout_top_p_token_ids": [1]}, "go together"),
        ({"rollout_top_p_token_offsets": [0, 0, 0, 0]}, "go together"),
        (
            {"rollout_top_p_token_ids": [1], "rollout_top_p_token_offsets": [0, 1]},
            "4 numbers that rise from 0 to 1",
        ),
        (
            {"rollout_top_p_token_ids": [1], "rollout_top_p_token_offsets": [0, 1, 0, 1]},
            "4 numbers that rise from 0 to 1",
        ),
        (
            {"rollout_top_p_token_ids": [1], "rollout_top_p_token_offsets": [0, 1, 1, 2]},
            "4 numbers that rise from 0 to 1",
        ),
        ({"rollout_log_probs": [0.0, float("inf"), 0.0]}, "not finite as a float32"),
        ({"loss_mask": [1, 1, 1]}, "disagrees with who wrote"),
        ({"loss_mask": None}, "disagrees with who wrote"),
        ({"segments": [Segment(Origin.MODEL, 0, 2, 1)]}, "cover 2 of 3"),
    ],
)
def test_validate_names_what_is_wrong(change: dict[str, object], message: str) -> None:
    sample = grow([1, 2], [(Origin.MODEL, [(3, -1.0), (4, -1.0)]), (Origin.ENV, [(5, 0.0)])])
    for name, value in change.items():
        setattr(sample, name, value)
    with pytest.raises(SampleError, match=message):
        sample.validate()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("status", "odd", "status cannot be read: 'odd' is not a valid Status"),
        ("status", [], "status cannot be read"),
        ("spec_info", 3, "spec_info cannot be read"),
        ("spec_info", {"x": 1}, "spec_info cannot be read"),
        ("spec_info", {"spec_verify_ct": "1"}, "spec_info.spec_verify_ct: .* valid integer, got '1'"),
        ("segments", [3], "segments cannot be read"),
        ("segments", [["nobody", 0, 1, 1]], "segments cannot be read: 'nobody'"),
        ("segments", [["model", "0", 1, 1]], "segments.0.start: .* valid integer, got '0'"),
        ("tokens", [1, "a"], "tokens cannot be trained with"),
        ("tokens", [1.0], "tokens cannot be trained with"),
        ("tokens", [True], "tokens cannot be trained with: it holds true or false"),
        ("tokens", [2**31], "tokens cannot be trained with"),
        ("tokens", {"1": 2}, "tokens cannot be trained with: expected a list"),
        ("tokens", None, "tokens cannot be trained with: expected a list, got None"),
        ("tokens", "abc", "tokens cannot be trained with: expected a list"),
        ("loss_mask", [256], "loss_mask cannot be trained with"),
        ("rollout_log_probs", ["a"], "rollout_log_probs cannot be trained with"),
        ("rollout_log_probs", [-1e39], "rollout_log_probs cannot be trained with: .* not finite as a float32"),
        ("metadata", [1], "metadata: .* valid dictionary"),
        ("metadata", None, "metadata: .* valid dictionary"),
        ("index", "3", "index: .* valid integer, got '3'"),
        ("group_index", True, "group_index: .* valid integer, got True"),
        ("response_length", "1", "response_length: .* valid integer"),
        ("prompt", [3], "prompt"),
        ("reward", "1", "reward"),
        ("weight_versions", [1], "weight_versions.0: .* valid string"),
        ("remove_sample", 1, "remove_sample: .* valid boolean"),
        ("non_generation_time", "1", "non_generation_time: .* valid number"),
    ],
)
def test_what_is_read_is_of_the_right_types(field: str, value: object, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        Sample.from_dict({field: value})
    sample = grow([1], [(Origin.MODEL, [(2, -1.0)])])
    setattr(sample, field, value)
    if value not in ([True], [-1e39]):
        with pytest.raises(SampleError, match=field):
            sample.validate()


@pytest.mark.parametrize("data", [None, 3, "x", [1], {1: 2}, {"tokens": [1], None: 2}])
def test_what_is_no_sample_at_all_is_refused(data: Any) -> None:
    with pytest.raises(SampleError, match="a sample must be an object|unknown sample fields"):
        Sample.from_dict(data)


def test_samples_that_disagree_with_themselves_are_not_read() -> None:
    with pytest.raises(SampleError, match="response_length is 2 but there are 1 tokens"):
        Sample.from_dict({"tokens": [1], "response_length": 2})


def test_numbers_of_numpy_are_numbers() -> None:
    sample = Sample(tokens=list(np.arange(3)), response_length=2, loss_mask=[True, False])
    sample.rollout_log_probs, sample.reward = list(np.array([-0.5, 0], np.float32)), np.float64(1)
    assert sample.validate().compact().tokens == array("i", [0, 1, 2])


def test_arrays_of_other_types_are_refused() -> None:
    arrays, rest = grow([1], [(Origin.MODEL, [(2, -1.0)])]).to_arrays()
    for name, values in {"tokens": arrays["tokens"].astype(np.int64), "reward": arrays["tokens"]}.items():
        with pytest.raises(SampleError, match=f"the array '{name}'"):
            Sample.from_arrays({**arrays, name: values}, rest)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), "1", {"a": 1.0}])
def test_reward_must_be_a_finite_number(reward: Any) -> None:
    with pytest.raises(SampleError):
        Sample(reward=reward).get_reward_value()


def test_reward_key_picks_from_a_dict() -> None:
    assert Sample(reward={"score": 2, "format": 0.5}).get_reward_value("score") == 2.0


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(SampleError, match="unknown sample fields"):
        Sample.from_dict({"tokens": [], "foo": 1})


def test_routing_lags_behind_and_what_is_known_stays() -> None:
    sample = Sample(index=1)
    sample.set_prompt_tokens([1, 2, 3])
    sample.append_model([4, 5], [-1.0, -1.0], routed=np.arange(8, dtype=np.int16).reshape(4, 2))
    sample.append_observation([6, 7])
    sample.append_model([8], [-1.0], routed=np.arange(8, 14, dtype=np.int16).reshape(3, 2))
    expected = np.arange(14).reshape(7, 2)  # of tokens 1 to 7: the last one has not been through the model
    arrays, rest = sample.to_arrays()
    stored = decode_group(encode_group([sample.compact()]))[0]
    read = Sample.from_dict(orjson.loads(orjson.dumps(sample.to_dict())))
    for one in (sample, Sample.from_arrays(arrays, rest), stored, read):
        np.testing.assert_array_equal(one.routing(), expected)
        assert one.validate().routing().dtype == np.int16  # type: ignore[union-attr]
    with pytest.raises(SampleError, match="append_model got experts for 2 tokens more"):
        sample.append_model([9], [-1.0], routed=np.zeros((2, 2), np.int16))
    sample.set_prompt_tokens([1])
    assert sample.routing() is None


def test_routing_of_a_users_own_is_what_it_says() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=1)
    for rows in (np.ones((2, 3, 2), np.int32), torch.ones(2, 3, 2, dtype=torch.int64), [[[1, 1]] * 3] * 2):
        sample.rollout_routed_experts = rows
        np.testing.assert_array_equal(sample.validate().routing(), np.ones((2, 6)))
    wrong = {"x": "no array", (1.5,): "numbers of experts", (-1,): "numbers of experts", (70000,): "numbers of experts"}
    for bad, said in [*wrong.items(), ([[1], [1, 2]], "no array"), ([[1]] * 4, "4 rows, and the sample 3 tokens")]:
        sample.rollout_routed_experts = [list(bad)] if isinstance(bad, tuple) else bad
        with pytest.raises(SampleError, match=said):
            sample.validate()


def test_no_pixels_are_none() -> None:
    found = Sample.from_dict({**Sample().to_dict(), "multimodal_train_inputs": {}})
    assert found == Sample.from_dict(found.to_dict())
