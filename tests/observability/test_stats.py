"""pass@k against brute force; distributions and comparisons."""

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.observability.stats import Distribution, compare, length_stats, pass_at_1, pass_at_k, quantile
from agentrl.sample import Sample, Status


def brute_force(n: int, c: int, k: int) -> float:
    draws = list(combinations(range(n), k))
    return sum(any(i < c for i in draw) for draw in draws) / len(draws)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            assert pass_at_k(n, c, k) == pytest.approx(brute_force(n, c, k), abs=1e-12)
        assert pass_at_1(n, c) == pytest.approx(c / n)


@given(n=st.integers(1, 2000), data=st.data())
@settings(max_examples=50, deadline=None)
def test_pass_at_k_agrees_with_exact_integers_for_large_n(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    exact = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert pass_at_k(n, c, k) == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
def test_pass_at_k_refuses_nonsense(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(n, c, k)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_distribution_lies_between_its_extremes(values: list[float]) -> None:
    found = Distribution.of(values)
    slack = 1e-6
    assert found.count == len(values)
    assert found.smallest - slack <= found.median <= found.p95 + slack <= found.largest + 2 * slack
    assert found.smallest - slack <= found.mean <= found.largest + slack


def test_distribution_leaves_out_what_is_not_finite() -> None:
    assert Distribution.of([1.0, math.nan, 3.0, math.inf]) == Distribution(2, 2.0, 2.0, 2.9, 1.0, 3.0)
    assert Distribution.of([]) == Distribution()


def test_quantile_is_linear_between_neighbours() -> None:
    assert quantile([0.0, 10.0], 0.25) == 2.5
    with pytest.raises(ValueError, match="quantile"):
        quantile([], 0.5)


def make(length: int, reward: float | None, *, status: Status = Status.COMPLETED, seconds: float = 0.0) -> Sample:
    sample = Sample(reward=reward, status=status, non_generation_time=seconds)
    sample.set_prompt_tokens([1])
    sample.append_model(list(range(length)), [-0.5] * length)
    return sample


def test_length_stats() -> None:
    found = length_stats([make(2, 1.0), make(4, 0.0, status=Status.TRUNCATED), make(6, 0.0, status=Status.FAILED)])
    assert found.length.mean == 4
    assert (found.truncated, found.failed) == pytest.approx((1 / 3, 1 / 3))
    assert length_stats([]).truncated == 0


def test_comparison_shows_what_dropping_slow_work_does() -> None:
    quick, slow, broken = make(2, 1.0, seconds=1), make(10, 0.0, seconds=9), make(4, None, seconds=2)
    found = compare([quick, slow, broken], [quick])
    assert found["length"].shift == pytest.approx(2 - 16 / 3)
    assert found["time"].shift == pytest.approx(1 - 4)
    assert found["reward"].shift == pytest.approx(0.5)
    assert found["reward"].offered.count == 2
