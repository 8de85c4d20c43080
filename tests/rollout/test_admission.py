"""Admission: how many groups may start, without a loop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.admission import Admission

FINISHED, DROPPED, GIVEN_BACK = "finished", "dropped", "given back"


@given(
    st.integers(0, 20),
    st.integers(0, 10),
    st.lists(st.sampled_from([FINISHED, DROPPED, GIVEN_BACK]), max_size=200),
    st.integers(0, 3),
)
def test_every_batch_ends_with_exactly_its_target_and_never_exceeds_the_limit(
    target: int, extra: int, outcomes: list[str], have: int
) -> None:
    admission, fate = Admission(target, target + extra), iter(outcomes)
    for _ in range(2):
        assert admission.wanted == 0, "between batches nothing starts"
        admission.begin(have)
        counted = have
        while not admission.full:
            for _ in range(admission.wanted):
                admission.started()
            assert admission.kept + admission.in_flight == admission.limit
            assert admission.wanted == 0
            match next(fate, FINISHED):
                case "given back":
                    admission.given_back()
                case outcome:
                    admission.finished(keep=outcome == FINISHED)
                    counted += outcome == FINISHED
        assert admission.kept == counted == max(target, have)
        admission.end()
        while admission.in_flight:
            admission.given_back()


def test_a_full_or_closed_batch_takes_no_more() -> None:
    admission = Admission(1, 2)
    assert not admission.takes
    admission.begin()
    for _ in range(2):
        admission.started()
    assert admission.takes
    admission.finished(keep=True)
    assert not admission.takes
    admission.given_back()
    assert (admission.kept, admission.in_flight) == (1, 0)
    admission.begin()
    assert admission.takes
    admission.end()
    assert not admission.takes


def test_only_drops_in_a_row_are_hopeless() -> None:
    admission = Admission(6, 6)
    admission.begin()
    for outcome in [False] * 59 + [True] + [False] * 59:
        assert not admission.hopeless
        admission.started()
        admission.finished(keep=outcome)
    assert not admission.hopeless
    admission.started()
    admission.finished(keep=False)
    assert admission.hopeless
    admission.begin()
    assert not admission.hopeless


def test_under_sampling_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 <= target <= limit"):
        Admission(3, 2)
