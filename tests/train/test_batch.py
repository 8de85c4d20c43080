"""The interface between rollout and training: the layout of batches, refused samples, and lossless transfer."""

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import SampleError, TrainError
from agentrl.media import Image, ImageSpan
from agentrl.modelfolder import ImageTokens
from agentrl.sample import Sample
from agentrl.train.batch import TrainBatch, check_samples
from tests.support.vision import picture


def make_sample(
    index: int = 0,
    model: int = 2,
    observed: int = 1,
    reward: float | dict[str, Any] | None = 1.0,
    **changes: object,
) -> Sample:
    sample = Sample(index=index, group_index=100, reward=reward)
    sample.set_prompt_tokens([1, 2, 3])
    sample.append_model(list(range(10, 10 + model)), [-0.5 * (i + 1) for i in range(model)], "7", turn=1)
    sample.append_observation([7] * observed, turn=1)
    sample.append_model([20], [-0.25], "12", turn=2)
    sample.metadata["step_rewards"] = [0.5, None]
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


@st.composite
def group_lists(draw: st.DrawFn) -> list[list[Sample]]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    shape = st.tuples(st.integers(0, 4), st.integers(0, 3), st.sampled_from([None, 0, 1]))
    groups, index = [], 0
    for size in sizes:
        group = []
        for model, observed, rollout in draw(st.lists(shape, min_size=size, max_size=size)):
            group.append(make_sample(index, model, observed, float(index), rollout_id=rollout))
            index += 1
        groups.append(group)
    return groups


def assert_same_samples(batch: TrainBatch, samples: list[Sample]) -> None:
    assert len(batch) == len(samples)
    for i, sample in enumerate(samples):
        assert batch.sample_tokens(i).tolist() == sample.tokens
        assert batch.sample_loss_mask(i).tolist() == sample.loss_mask
        assert batch.rewards[i] == sample.reward
        response = batch.response_slice(i)
        assert batch.rollout_log_probs is not None
        log_probs = np.asarray(sample.rollout_log_probs, np.float32)
        np.testing.assert_array_equal(batch.rollout_log_probs[response], log_probs)
        assert batch.response_tokens[response].tolist() == sample.tokens[sample.prompt_length :]
        assert batch.turns[response].tolist() == [1] * (sample.response_length - 1) + [2]
        ages = [6 if token < 20 else 1 for token in sample.tokens[sample.prompt_length :]]
        assert batch.staleness[response].tolist() == [
            age if m else -1 for age, m in zip(ages, sample.loss_mask or [], strict=True)
        ]
        assert batch.sample_indices[i] == sample.index
        assert (batch.lengths[i], batch.response_lengths[i]) == (len(sample.tokens), sample.response_length)


@given(group_lists())
def test_samples_are_laid_out_in_order(groups: list[list[Sample]]) -> None:
    batch = TrainBatch.from_samples(groups, trained=13)
    assert_same_samples(batch, [s for group in groups for s in group])
    assert batch.group_ids.tolist() == [g for g, group in enumerate(groups) for _ in group]
    assert len(np.unique(batch.group_ids)) == len(groups)


@given(group_lists(), st.data())
def test_select_takes_whole_samples_in_the_order_asked(groups: list[list[Sample]], data: st.DataObject) -> None:
    samples = [s for group in groups for s in group]
    batch = TrainBatch.from_samples(groups, trained=13)
    chosen = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=6))
    part = batch.select(chosen)
    assert_same_samples(part, [samples[i] for i in chosen])
    assert part.group_ids.tolist() == batch.group_ids[chosen].tolist()
    assert part.trajectory_ids.tolist() == batch.trajectory_ids[chosen].tolist()


@given(group_lists(), st.integers(1, 7))
def test_steps_are_whole_trajectories_and_cover_everything_once(groups: list[list[Sample]], steps: int) -> None:
    batch = TrainBatch.from_samples(groups)
    parts = list(batch.split(steps))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(batch)))
    sets = [set(batch.trajectory_ids[part].tolist()) for part in parts]
    trajectories = len(set().union(*sets))
    assert sum(map(len, sets)) == trajectories
    assert len(parts) == min(steps, trajectories)
    assert max(map(len, sets)) - min(map(len, sets)) <= 1


@pytest.mark.parametrize(("groups", "each", "steps"), [(2, 8, 4), (3, 4, 2), (1, 4, 4), (16, 8, 4)])
def test_steps_have_the_global_batch_size_even_where_groups_do_not_divide(groups: int, each: int, steps: int) -> None:
    samples = [[make_sample(g * each + i) for i in range(each)] for g in range(groups)]
    parts = list(TrainBatch.from_samples(samples).split(steps))
    assert [len(part) for part in parts] == [groups * each // steps] * steps


def test_siblings_share_a_rollout_number_only_within_their_group() -> None:
    shared = [make_sample(0, rollout_id=5), make_sample(1, rollout_id=5), make_sample(2), make_sample(3)]
    other = [make_sample(4, rollout_id=5)]
    assert TrainBatch.from_samples([shared, other]).trajectory_ids.tolist() == [0, 0, 1, 2, 3]


def test_a_removed_sample_keeps_its_reward_and_loses_its_mask() -> None:
    batch = TrainBatch.from_samples([[make_sample(0), make_sample(1, reward=0.5, remove_sample=True)]])
    assert batch.sample_loss_mask(1).tolist() == [0] * 4
    assert batch.rewards.tolist() == [1.0, 0.5]
    assert batch.sample_loss_mask(0).any()


def test_a_removed_sample_may_lack_reward_and_log_probs() -> None:
    broken = make_sample(1, reward=None, remove_sample=True, rollout_log_probs=None)
    batch = TrainBatch.from_samples([[make_sample(0), broken]])
    assert math.isnan(batch.rewards[1])
    assert batch.rollout_log_probs is not None
    assert batch.rollout_log_probs[batch.response_slice(1)].tolist() == [0.0] * 4


def test_dict_rewards() -> None:
    samples = [make_sample(reward={"score": 0.5, "other": 2.0})]
    assert TrainBatch.from_samples([samples], "score").rewards.tolist() == [0.5]
    with pytest.raises(SampleError, match="--reward-key"):
        TrainBatch.from_samples([samples])


def test_the_reward_of_a_failed_sample_is_each_part_of_its_reward() -> None:
    whole, failed = make_sample(0, reward={"a": 0.5, "b": 2.0}), make_sample(1, reward=0.0, remove_sample=True)
    with pytest.raises(SampleError, match="sample index=1: its reward 0.0 is no dict with the entries a, b"):
        TrainBatch.from_samples([[whole, failed]], "a", reward_parts=["a", "b"])
    failed.metadata["failure"] = {"blame": "env", "kind": "env_timeout", "message": "late"}
    batch = TrainBatch.from_samples([[whole, failed]], "a", reward_parts=["a", "b"])
    assert batch.reward_parts is not None
    assert batch.reward_parts.tolist() == [[0.5, 2.0], [0.0, 0.0]]


def test_a_token_of_weight_0_does_not_train() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2, reward=0.0, rollout_log_probs=[-1.0, -2.0])
    sample.train_metadata = {"weight": 0.0}
    assert TrainBatch.from_samples([[sample]]).loss_mask.tolist() == [0, 0]


def test_without_a_loss_mask_the_whole_response_trains() -> None:
    plain = Sample(tokens=[1, 2, 3], response_length=2, reward=0.0, rollout_log_probs=[-1.0, -2.0])
    assert TrainBatch.from_samples([[plain]]).loss_mask.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (make_sample(1, rollout_log_probs=None), "sample index=1 .*rollout_log_probs is missing"),
        (make_sample(1, train_metadata={"turn_weights": [1.0]}), "turn_weights must have one number for each of 2"),
        (make_sample(1, reward={"a": 1.0}), "no dict with the entries a, b"),
        (make_sample(1, loss_mask=[1]), "loss_mask has 1 entries"),
    ],
)
def test_what_no_batch_can_be_made_of_is_found_in_the_samples(wrong: Sample, message: str) -> None:
    sound = make_sample(reward={"a": 1.0, "b": 0.0}, train_metadata={"turn_weights": [1.0, 0.5]})
    check_samples([sound], ["a", "b"])
    check_samples([make_sample(reward=1.0)])
    with pytest.raises(SampleError, match=message):
        check_samples([sound, wrong], ["a", "b"])


def test_supervised_batches_need_neither_reward_nor_log_probs() -> None:
    plain = Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[1, 1])
    batch = TrainBatch.from_samples([[plain]], supervised=True)
    assert batch.rollout_log_probs is None
    assert batch.rewards.tolist() == [0.0]
    with pytest.raises(SampleError, match="rollout_log_probs is missing"):
        TrainBatch.from_samples([[plain]])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": [], "response_length": 0, "loss_mask": [], "rollout_log_probs": [], "segments": []}, "no tokens"),
        ({"tokens": [1, 2, -3, 4, 5, 6, 7]}, "-3 is negative"),
        ({"loss_mask": [1]}, "loss_mask has 1"),
        ({"reward": None}, "reward must be a finite number"),
        ({"reward": float("nan")}, "reward must be a finite number"),
        ({"rollout_log_probs": None}, "append_model"),
    ],
)
def test_bad_samples_are_refused_by_index(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SampleError, match=words) as caught:
        TrainBatch.from_samples([[make_sample(0), make_sample(41, **changes)]])
    assert "index=41" in str(caught.value)


def test_what_no_trainer_can_use_is_refused() -> None:
    with pytest.raises(TrainError, match="at least one sample"):
        TrainBatch.from_samples([[], []])


def test_a_steps_reward_lies_on_its_turns_last_model_token() -> None:
    sample = make_sample(0, model=3, observed=2)
    sample.append_observation([7], turn=2)
    sample.append_model([21, 22], [-0.1, -0.1], [("12", 0, 1), ("13", 1, 2)], turn=3)
    sample.metadata["step_rewards"] = [0.5, None, -1.0]
    plain = Sample(tokens=[1, 2, 3], response_length=2, reward=0.0, rollout_log_probs=[-1.0, -2.0])
    batch = TrainBatch.from_samples([[sample, plain]], trained=13)
    assert batch.step_rewards is not None
    assert batch.step_rewards.tolist() == [0, 0, 0.5, 0, 0, 0, 0, 0, 0.5, 0, 0]
    assert batch.turns.tolist() == [1, 1, 1, 1, 1, 2, 2, 3, 3, 0, 0]
    assert batch.staleness.tolist() == [6, 6, 6, -1, -1, 1, -1, 1, 0, -1, -1]
    again = batch.select([1, 0])
    assert again.step_rewards is not None
    assert again.step_rewards.tolist() == [0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0.5]


def test_without_step_rewards_there_is_no_array() -> None:
    silent = make_sample()
    silent.metadata["step_rewards"] = [None, None]
    assert TrainBatch.from_samples([[silent, make_sample(metadata={})]]).step_rewards is None
    broken = make_sample(index=41, metadata={"step_rewards": [0.5, math.inf]})
    with pytest.raises(SampleError, match="index=41: step_rewards of turn 2 must be a finite number or None, got inf"):
        TrainBatch.from_samples([[broken]])


def test_staleness_of_versions_that_are_not_known_or_no_numbers() -> None:
    named = (
        make_sample(remove_sample=True),
        Sample(
            tokens=[1, 2, 3],
            response_length=2,
            reward=0.0,
            loss_mask=[0, 1],
            rollout_log_probs=[0.0, -2.0],
            weight_versions=["4"],
        ),
    )
    other = Sample(tokens=[1, 2], response_length=1, reward=0.0, rollout_log_probs=[0.0], weight_versions=["default"])
    assert TrainBatch.from_samples([[*named, other]]).staleness.tolist() == [-1] * 7
    for trained, age in ((6, 2), (3, 0)):
        batch = TrainBatch.from_samples([[*named, other]], trained=trained)
        assert batch.staleness.tolist() == [-1, -1, -1, -1, -1, age, -1]


def test_a_teachers_log_probs_are_there_if_every_sample_that_trains_has_them() -> None:
    first, masked = make_sample(), make_sample(1, remove_sample=True)
    assert TrainBatch.from_samples([[first, masked]]).teacher_log_probs is None
    first.teacher_log_probs = [-0.5] * first.response_length
    batch = TrainBatch.from_samples([[masked, first]])
    assert batch.teacher_log_probs is not None
    assert batch.teacher_log_probs.tolist() == [0.0] * masked.response_length + [-0.5] * first.response_length
    chosen = batch.select([1]).teacher_log_probs
    assert chosen is not None
    assert chosen.tolist() == [-0.5] * first.response_length


def test_arrays_are_read_only() -> None:
    batch = TrainBatch.from_samples([[make_sample()]])
    with pytest.raises(ValueError, match="read-only"):
        batch.tokens[0] = 5


@given(group_lists())
def test_pickle_is_out_of_band(groups: list[list[Sample]]) -> None:
    batch = TrainBatch.from_samples(groups)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    again = pickle.loads(data, buffers=buffers)
    for name, array in batch.arrays().items():
        np.testing.assert_array_equal(getattr(again, name), array)
    assert any(np.shares_memory(again.tokens, np.frombuffer(b.raw(), np.uint8)) for b in buffers if b.raw().nbytes)


def test_selecting_beyond_the_end() -> None:
    with pytest.raises(IndexError, match=r"0\.\.0"):
        TrainBatch.from_samples([[make_sample()]]).select([1])


def truncated_sample(index: int = 0, *, missing: bool = False, **changes: object) -> Sample:
    sample = Sample(index=index, reward=1.0)
    sample.set_prompt_tokens([1, 2])
    sample.append_model([10 + index, 11], [-0.5, -0.1], kept=[[9, 10 + index], [8 if missing else 11]])
    sample.append_observation([7, 7])
    sample.append_model([20], [0.0], kept=[[20, 3, 4]])
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def test_kept_sets_go_with_their_tokens() -> None:
    batch = TrainBatch.from_samples([[truncated_sample(i).compact() for i in range(3)]], truncated=True)
    ids, bounds = batch.sampling_support(np.array([10, 4, 2])) or ([], [])
    assert (list(ids), list(bounds)) == ([9, 12, 20, 3, 4], [0, 2, 5, 5])
    ids, bounds = batch.select([2, 0]).sampling_support(np.arange(10)) or ([], [])
    assert list(ids) == [9, 12, 11, 20, 3, 4, 9, 10, 11, 20, 3, 4]
    assert list(np.diff(bounds)) == [2, 1, 0, 0, 3] * 2
    assert TrainBatch.from_samples([[make_sample()]]).sampling_support(np.arange(2)) is None


@pytest.mark.parametrize(
    "samples",
    [
        [make_sample()],
        [truncated_sample(), make_sample()],
        [truncated_sample(missing=True)],
        [truncated_sample(rollout_top_p_token_ids=None, rollout_top_p_token_offsets=None)],
    ],
)
def test_trained_tokens_without_their_kept_sets_are_refused(samples: list[Sample]) -> None:
    with pytest.raises(
        SampleError, match=r"[123] of its trained tokens are not in the sets .*--allow-truncated-sampling"
    ):
        TrainBatch.from_samples([samples], truncated=True)


def test_what_is_not_trained_needs_no_kept_set() -> None:
    masked = truncated_sample(missing=True, loss_mask=[0, 0, 0, 0, 1])
    removed = make_sample(1, remove_sample=True)
    batch = TrainBatch.from_samples([[masked, removed]], truncated=True)
    assert batch.support_offsets is not None
    assert len(batch.support_offsets) == 5 + removed.response_length + 1


def routed_sample(rows: int, width: int = 2, **changes: Any) -> Sample:
    """Make a sample with a prompt of 2, a model's 2 tokens, and an observation of 1."""
    sample = Sample(index=rows, reward=1.0, **changes)
    sample.set_prompt_tokens([1, 2])
    sample.append_model([3, 4], [-1.0, -1.0], routed=np.full((min(rows, 3), width), rows, np.int16))
    sample.append_observation([5])
    return sample


def test_routing_goes_with_its_tokens() -> None:
    removed = routed_sample(0, remove_sample=True)
    batch = TrainBatch.from_samples([[routed_sample(3), removed]], routed=True)
    own = [[3, 3]] * 3 + [[-1, -1]] * 2
    assert batch.routed_experts is not None
    assert [batch.sample_routing(i).tolist() for i in range(2)] == [own, [[-1, -1]] * 5]
    fetched: list[Any] = []

    def stored(own: Any) -> Any:
        def fetch() -> Any:
            fetched.append(own)
            return own

        return fetch

    stored_batch = batch.with_parts(stored)
    assert stored_batch.select([1, 0]).sample_routing(1).tolist() == own
    assert len(fetched) == 1
    chosen = batch.select([1, 0])
    assert chosen.sample_routing(1).tolist() == own
    assert TrainBatch.from_samples([[routed_sample(3)]]).routed_experts is None
    assert TrainBatch.from_samples([[removed]], routed=True).routed_experts is None


def test_routing_that_is_missing_or_of_two_models_is_refused() -> None:
    with pytest.raises(
        SampleError, match="sample index=2: rollout_routed_experts has 2 rows, and 3 tokens come before"
    ):
        TrainBatch.from_samples([[routed_sample(2)]], routed=True)
    with pytest.raises(SampleError, match=r"rows of \[2, 4\] numbers"):
        TrainBatch.from_samples([[routed_sample(3), routed_sample(3, 4)]], routed=True)


PAD, FIRST, SECOND = 9, *(Image.from_bytes(picture(8, 8, seed)) for seed in range(2))


def seeing_sample(*images: Image) -> Sample:
    """Token 1, the first image's 3 placeholders, token 2; 10, 11 of the model; each other image's 2 and token 7."""
    sample = Sample(index=len(images), reward=1.0, images={each.hash: each for each in images})
    sample.set_prompt_tokens([1, PAD, PAD, PAD, 2], [ImageSpan(images[0].hash, 1, 4)])
    sample.append_model([10, PAD], [-1.0, -1.0], turn=1)
    for each in images[1:]:
        sample.append_observation([PAD, PAD, 7], turn=1, spans=[ImageSpan(each.hash, 0, 2)])
    sample.append_model([11], [-1.0], turn=2)
    return sample


def test_an_image_is_in_the_batch_once_and_goes_with_its_samples() -> None:
    batch = TrainBatch.from_samples([[seeing_sample(FIRST), seeing_sample(SECOND, FIRST)], [make_sample()]])
    assert [each.held for each in batch.pictures] == [FIRST, SECOND]
    spans = [[[0, 1, 4]], [[1, 1, 4], [0, 7, 9]], []]
    assert [batch.sample_images(i).tolist() for i in range(3)] == spans
    keys = [1, -1, -1, -1, 2, 10, PAD, 11, 1, -2, -2, -2, 2, 10, PAD, -1, -1, 7, 11]
    assert batch.keys.tolist() == [*keys, *make_sample().tokens]
    assert batch.tokens.tolist()[:8] == [1, PAD, PAD, PAD, 2, 10, PAD, 11]
    chosen = batch.select([2, 1])
    assert [chosen.sample_images(i).tolist() for i in range(2)] == [[], spans[1]]
    assert chosen.keys.tolist() == [*make_sample().tokens, *keys[8:]]
    fetched = pickle.loads(pickle.dumps(batch.with_parts(lambda held: [held])))
    assert [each.held for each in fetched.pictures] == [[FIRST], [SECOND]]


def test_equal_ids_with_other_images_are_other_observations() -> None:
    batch = TrainBatch.from_samples([[seeing_sample(FIRST), seeing_sample(SECOND), seeing_sample(FIRST, SECOND)]])
    first, other, same = (int(batch.observation_ids[batch.response_slice(i)][0]) for i in range(3))
    assert first == same != other


def test_images_that_no_model_can_read_are_refused() -> None:
    def refused(sample: Sample, reason: str) -> None:
        with pytest.raises(SampleError, match=reason):
            TrainBatch.from_samples([[sample]], image_tokens=ImageTokens(PAD, 4))

    sample = seeing_sample(FIRST)
    sample.images = {}
    refused(sample, f"index=1 .*image_spans name the image {FIRST.hash}")
    sample = seeing_sample(FIRST, SECOND)
    sample.image_spans = [ImageSpan(FIRST.hash, 1, 2), ImageSpan(SECOND.hash, 2, 4)]
    refused(sample, "two images follow each other")


@pytest.mark.parametrize(
    ("grids", "rows", "reason"),
    [
        ([[1, 2, 6]], 12, ""),
        ([[1, 2, 6], [1, 2, 4]], 20, "image 1 has 8 patches, but tokens have no run of 2 placeholders 9"),
        ([[1, 2, 6]], 8, "needs one row for each patch"),
        ([1, 2, 6], 12, "needs one row for each patch"),
        (None, 12, "expected pixel_values and image_grid_thw, and no videos"),
    ],
)
def test_pixels_that_a_sample_brings_lie_at_runs_of_their_length(grids: Any, rows: int, reason: str) -> None:
    sample = seeing_sample(FIRST)
    sample.images, sample.image_spans = {}, []
    sample.multimodal_train_inputs = {"pixel_values": np.ones((rows, 5)), "image_grid_thw": grids}
    if grids is None:
        del sample.multimodal_train_inputs["image_grid_thw"]
    with pytest.raises(SampleError, match="sees no images"):
        TrainBatch.from_samples([[sample]])
    if reason:
        with pytest.raises(SampleError, match=reason):
            TrainBatch.from_samples([[sample]], image_tokens=ImageTokens(PAD, 4))
        return
    batch = TrainBatch.from_samples([[sample, sample]], image_tokens=ImageTokens(PAD, 4))
    assert batch.image_spans.tolist() == [[0, 1, 4]] * 2
    held: Any = batch.pictures[0].held
    assert (held["pixel_values"].shape, held["image_grid_thw"].tolist()) == ((12, 5), [[1, 2, 6]])
