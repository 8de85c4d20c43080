"""pass@k against brute force."""

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.observability.stats import pass_at_k


def brute_force(n: int, c: int, k: int) -> float:
    draws = list(combinations(range(n), k))
    return sum(any(i < c for i in draw) for draw in draws) / len(draws)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            assert pass_at_k(n, c, k) == pytest.approx(brute_force(n, c, k), abs=1e-12)


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
