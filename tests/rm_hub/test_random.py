"""The random baseline, without labelled pairs: its distribution, and that it is reproducible."""

import statistics
from typing import Any

import pytest

from agentrl.errors import GraderFailure
from agentrl.rm_hub import grade

N = 4000


def rewards(**metadata: Any) -> list[float]:
    return [grade("random", f"answer {i}", "18", metadata).score for i in range(N)]


def test_half_of_the_rewards_are_one() -> None:
    scores = rewards()
    assert set(scores) == {0.0, 1.0}
    assert abs(statistics.fmean(scores) - 0.5) < 4 * 0.5 / N**0.5


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.9, 1.0])
def test_the_rate_is_kept(rate: float) -> None:
    assert abs(statistics.fmean(rewards(random_rate=rate)) - rate) <= 4 * (rate * (1 - rate) / N) ** 0.5


def test_the_same_answer_gets_the_same_reward() -> None:
    assert rewards() == rewards()
    assert grade("random", "a", None).score == grade("random", "a", None).score


def test_seed_response_and_label_all_count() -> None:
    assert rewards() != rewards(seed=1)
    assert rewards(seed=1) != rewards(seed="1")
    by_label = [[grade("random", f"answer {i}", label).score for i in range(100)] for label in ("18", "19")]
    assert by_label[0] != by_label[1]


def test_seeds_are_independent() -> None:
    agree = statistics.fmean(a == b for a, b in zip(rewards(seed=1), rewards(seed=2), strict=True))
    assert abs(agree - 0.5) < 4 * 0.5 / N**0.5


@pytest.mark.parametrize("text", ["", "\0", "\ud800", "x" * 1_000_000])
def test_any_text_has_a_reward(text: str) -> None:
    assert grade("random", text, None).score in (0.0, 1.0)


@pytest.mark.parametrize("metadata", [{"seed": 1.5}, {"seed": None}, {"random_rate": 2}, {"random_rate": "x"}])
def test_metadata_of_the_wrong_type_is_an_error(metadata: dict[str, Any]) -> None:
    with pytest.raises(GraderFailure) as caught:
        grade("random", "a", None, metadata)
    assert caught.value.kind == "grader_bad_metadata"
