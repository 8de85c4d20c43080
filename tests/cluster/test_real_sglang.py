"""Training against the real SGLang server on CPU: weights by broadcast and by disk, log-probs in agreement."""

from pathlib import Path

import pytest

from agentrl.sample import Origin
from tests.support.audit import audit_ledger
from tests.support.real_sglang import MARKS, PYTHON
from tests.support.runs import RunKit, still_running
from tests.support.versions import staleness, trained_groups

pytestmark = MARKS


@pytest.mark.parametrize("mode", ["broadcast", "disk", "ipc"])
def test_three_steps_with_the_engine_following_the_trainer(tmp_path: Path, mode: str) -> None:
    kit = RunKit.make(tmp_path)
    settings = {"engine": "sglang", "engine_python": PYTHON, "update_weight_mode": mode, "lr": "3e-3"}
    settings |= {"colocate": mode == "ipc", "no_offload_rollout": mode == "ipc"}
    run = kit.start(kit.arguments("run", num_rollout=4, embedded_slots=None, embedded_threads=None, **settings))
    run.until(run.processes, timeout=600)
    processes = run.processes()
    assert run.wait(800) == 0, run.output
    assert still_running(processes) == []
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    # The learning rate changes the weights a lot; an engine with the old weights would disagree from step 1 on.
    assert all(row["train/train_rollout_logprob_abs_diff"] <= 0.02 for row in rows)
    result = audit_ledger(run.folder / "ledger.sqlite", through_step=3, groups_per_step=4)
    assert result.ok, result.problems


def test_asynchronous_steps_go_on_through_updates_in_flight(tmp_path: Path) -> None:
    """The server's version spans say which tokens of a turn came before an update and which after it."""
    kit = RunKit.make(tmp_path)
    settings = {"engine": "sglang", "engine_python": PYTHON, "update_weight_mode": "disk", "ledger_retention": "always"}
    form = {"max_staleness": 2, "pause_generation_mode": "retract", "rollout_max_response_len": 400}
    run = kit.start(kit.arguments("run", num_rollout=4, embedded_slots=None, embedded_threads=None, **settings, **form))
    assert run.wait(800) == 0, run.output
    result = audit_ledger(run.folder / "ledger.sqlite", through_step=3, groups_per_step=4, max_staleness=2)
    assert result.ok, result.problems
    assert set(staleness(run.folder / "ledger.sqlite")) <= {0, 1, 2}
    spans = [
        {segment.version for segment in sample.segments if segment.origin is Origin.MODEL and segment.turn == turn}
        for _, group in trained_groups(run.folder / "ledger.sqlite")
        for sample in group
        for turn in (1, 2)
    ]
    assert any(len(versions) > 1 for versions in spans), "no update met a turn in flight"
