"""Asynchronous runs whose processes are killed or stopped; `benchmarks/kill_resume.py` does this at many moments."""

from pathlib import Path

import pytest

from tests.support.kills import Fault, disturb_an_engine, kill_and_resume, kill_workers
from tests.support.nightly import weekly
from tests.support.runs import RunKit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    return RunKit.make(Path(tmp_path_factory.mktemp("kit")))


@pytest.mark.parametrize("role", weekly(["trainer", "rollout_worker", "driver"], 2))
def test_a_kill_with_trajectories_in_flight_loses_no_group_and_trains_none_twice(kit: RunKit, role: str) -> None:
    form = {"max_staleness": 2, "partial_rollout": True, "async_save": role != "rollout_worker"}
    outcome = kill_and_resume(kit, role, 0, steps=6, **form)
    assert outcome.ok, str(outcome)


@pytest.mark.parametrize("fault", weekly(["kill", "stop and continue", "stop"], 2))
def test_one_of_two_engines_may_go_at_any_moment(kit: RunKit, fault: Fault) -> None:
    outcome = disturb_an_engine(kit, 0, steps=6, fault=fault, max_staleness=1)
    assert outcome.ok, str(outcome)


def test_workers_of_several_die_at_random_moments_of_one_run(kit: RunKit) -> None:
    outcome = kill_workers(kit, 0, steps=20, kills=4, max_staleness=1, partial_rollout=True)
    assert "4 kills" in str(outcome)
    assert outcome.ok, str(outcome)


@pytest.mark.parametrize(
    ("fault", "mode"),
    weekly([("kill", "broadcast"), ("stop", "broadcast"), ("kill the guard", "broadcast"), ("kill", "disk")], 2),
)
def test_the_only_engine_may_go_too(kit: RunKit, fault: Fault, mode: str) -> None:
    outcome = disturb_an_engine(kit, 1, steps=6, fault=fault, engines=1, max_staleness=0, update_weight_mode=mode)
    assert outcome.ok, str(outcome)
