from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.admission import GroupScheduler


@given(st.integers(0, 20), st.integers(0, 10), st.lists(st.booleans(), max_size=200))
def test_it_ends_with_exactly_the_target_and_never_exceeds_the_limit(target: int, extra: int, outcomes) -> None:
    scheduler = GroupScheduler(target, target + extra)
    fate = iter(outcomes)
    counted = 0
    while not scheduler.done:
        scheduler.started(scheduler.wanted)
        assert scheduler.kept + scheduler.in_flight == scheduler.limit
        assert scheduler.wanted == 0
        counted += scheduler.finished(keep=next(fate, True))
    assert scheduler.kept == counted == target
    assert scheduler.wanted == 0


def test_a_kept_group_beyond_the_target_does_not_count() -> None:
    scheduler = GroupScheduler(1, 2)
    scheduler.started(2)
    assert scheduler.finished(keep=True)
    assert not scheduler.finished(keep=True)
    assert scheduler.kept == 1
