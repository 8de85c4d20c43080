"""Runs whose engines die or hang: they end as planned, with nothing lost and nothing left running."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.audit import audit_ledger
from tests.support.runs import RunKit, still_running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("mode", ["broadcast", "disk"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_of_two_engines_dies_or_hangs(tmp_path: Path, mode: str, number: signal.Signals) -> None:
    kit = RunKit.make(tmp_path)
    limits = {"engine_probe_interval": 1, "engine_hang_timeout": 5}
    run = kit.start(
        kit.arguments("run", rollout_num_gpus=2, num_rollout=12, update_weight_mode=mode, max_staleness=1, **limits)
    )
    run.until(lambda: "rollout 3/" in run.output)
    processes = run.processes()
    os.killpg(processes["engine"][0], number)
    assert run.wait() == 0, run.output
    assert [row["step"] for row in run.metrics()] == list(range(12))
    assert all(row["train/train_rollout_logprob_abs_diff"] <= 0.05 for row in run.metrics())
    result = audit_ledger(run.folder / "ledger.sqlite", through_step=11, groups_per_step=4)
    assert result.ok, result.problems
    assert still_running(processes) == []
