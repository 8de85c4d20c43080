"""The draw is a permutation and a pure function of (seed, epoch, n)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.order import DataPosition, PromptOrder, permute
from agentrl.errors import DataError


@given(st.integers(1, 300), st.integers(-(2**40), 2**70), st.integers(0, 1000))
def test_it_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert sorted(permute(i, n, seed=seed, epoch=epoch) for i in range(n)) == list(range(n))


def test_epochs_and_seeds_differ() -> None:
    def shuffled(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(permute(i, 50, seed=seed, epoch=epoch) for i in range(50))

    assert len({shuffled(seed, epoch) for seed in range(5) for epoch in range(5)} | {tuple(range(50))}) == 26


def test_the_shuffle_never_changes_between_releases() -> None:
    # A resumed run must draw what the stopped run would have drawn, also after an upgrade of any package.
    assert [permute(i, 10, seed=42, epoch=0) for i in range(10)] == [3, 2, 1, 7, 5, 4, 0, 6, 9, 8]


def test_rows_land_evenly() -> None:
    hits = [[0] * 8 for _ in range(8)]
    for epoch in range(4000):
        for i in range(8):
            hits[i][permute(i, 8, seed=1, epoch=epoch)] += 1
    # 500 are expected in each of the 64 cells; 400..600 is over 4 standard deviations.
    assert all(400 < count < 600 for row in hits for count in row)


def test_a_position_of_a_huge_file_costs_nothing() -> None:
    order = PromptOrder(10**15, seed=3, shuffle=True)
    places = {order.at(p) for p in range(1000)}
    assert len(places) == 1000


@given(st.integers(1, 40), st.booleans(), st.integers(1, 4))
def test_every_epoch_draws_every_row_once_and_then_it_ends(rows: int, shuffle: bool, epochs: int) -> None:
    order = PromptOrder(rows, seed=5, shuffle=shuffle, num_epoch=epochs)
    for epoch in range(epochs):
        drawn = [order.at(epoch * rows + i) for i in range(rows)]
        assert {place.epoch for place in drawn if place} == {epoch}
        assert sorted(place.prompt_index for place in drawn if place) == list(range(rows))
    assert order.at(rows * epochs) is None


def test_file_order_without_shuffle() -> None:
    order = PromptOrder(3)
    assert [order.at(p) for p in range(4)] == [
        DataPosition(0, 0),
        DataPosition(0, 1),
        DataPosition(0, 2),
        DataPosition(1, 0),
    ]


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(IndexError):
        permute(3, 3, seed=0, epoch=0)
    with pytest.raises(DataError, match="at least one prompt row"):
        PromptOrder(0)
