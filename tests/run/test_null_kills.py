"""A run with a trainer that computes nothing, killed repeatedly; `benchmarks/null_kills.py` does it 1,000 times."""

import pytest

from benchmarks import null_kills
from tests.support.nightly import weekly


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", weekly([0, 1], 1))
def test_a_run_that_is_killed_often_loses_no_group_and_trains_none_twice(number: int) -> None:
    killed = null_kills.run(number, kills=15)
    assert killed.problems == []
    assert killed.kills > 5
