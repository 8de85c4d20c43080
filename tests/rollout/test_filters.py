"""The filter's verdict on a finished group, without a run."""

import pytest

from agentrl import Sample
from agentrl.rollout.filters import FilterOutput, judged, mask_older


def finished(*, removed: bool = False, tokens: int = 2) -> Sample:
    sample = Sample(reward=1.0, remove_sample=removed)
    sample.set_prompt_tokens([1])
    if tokens:
        sample.append_model([5] * tokens, [-0.5] * tokens, "1")
    return sample


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ([finished(removed=True), finished(removed=True)], "nothing_to_train"),
        ([finished(tokens=0), finished(tokens=0)], "nothing_to_train"),
        ([finished(removed=True), finished(tokens=0)], "nothing_to_train"),
        ([finished(removed=True), finished()], None),
    ],
)
def test_a_group_without_a_trained_token_is_dropped(group: list[Sample], reason: str | None) -> None:
    assert judged(group, None, None) == FilterOutput(reason is None, reason)


def test_a_filter_that_gives_no_reason_is_named_filtered() -> None:
    assert judged([finished()], lambda args, samples: False, None) == FilterOutput(False, "filtered")


def test_a_filter_is_not_asked_for_a_group_without_a_trained_token() -> None:
    def keep(args: object, samples: list[Sample]) -> bool:
        raise AssertionError

    assert judged([finished(removed=True)], keep, None).reason == "nothing_to_train"


@pytest.mark.parametrize(("version", "masked"), [(1, 0), (2, 0), (3, 2), (4, 5)])
def test_tokens_of_the_version_asked_for_still_train(version: int, masked: int) -> None:
    sample = finished(tokens=0)
    sample.append_model([5] * 5, [-0.5] * 5, [("2", 0, 2), ("3", 2, 5)])
    assert mask_older(sample, version) == masked
    assert sample.loss_mask == [0] * masked + [1] * (5 - masked)


def test_tokens_of_weights_that_are_not_known_train_only_while_any_version_does() -> None:
    def of_a_function(versions: list[str]) -> Sample:
        return Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[1, 1], weight_versions=versions)

    sample = finished()
    sample.append_model([5] * 3, [-0.5] * 3)  # without its version
    sample.append_model([5], [-0.5], "a label")
    bare, mixed, known = of_a_function([]), of_a_function(["1", "2"]), of_a_function(["2"])
    assert [mask_older(each, 0) for each in (sample, bare, mixed, known)] == [0, 0, 0, 0]
    assert mask_older(sample, 1) == 4
    assert sample.loss_mask == [1, 1, 0, 0, 0, 0]
    assert [mask_older(each, 1) for each in (bare, mixed)] == [2, 2]
    assert [mask_older(known, version) for version in (1, 2, 3)] == [0, 0, 2]
