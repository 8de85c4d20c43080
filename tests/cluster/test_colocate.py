"""Trainer and engines alternate on one placement: the same numbers, less memory, also if killed at any moment."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from tests.support.kills import disturb_an_engine, kill_and_resume
from tests.support.nightly import weekly
from tests.support.runs import Run, RunKit
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TURNS: dict[str, Any] = {"colocate": True, "actor_num_gpus_per_node": 2}


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    return RunKit.make(Path(tmp_path_factory.mktemp("kit")))


class Watch(threading.Thread):
    """Resident bytes of a run's trainer and engine: (trainer, engine), every few milliseconds."""

    def __init__(self, run: Run) -> None:
        super().__init__(daemon=True)
        self.run_, self.seen = run, list[tuple[int, int]]()

    def run(self) -> None:
        ids = self.run_.processes()
        trainer = psutil.Process(ids["trainer"][0])
        # The run lists the parent watchdog; the server is its child.
        engine = max(psutil.Process(ids["engine"][0]).children(), key=lambda process: process.memory_info().rss)
        while self.run_.process.poll() is None:
            try:
                self.seen.append((trainer.memory_info().rss, engine.memory_info().rss))
            except psutil.NoSuchProcess:
                return
            time.sleep(0.005)


@pytest.mark.parametrize("mode", weekly(["broadcast", "disk"], 1))
def test_each_side_has_the_memory_in_its_turn_and_the_numbers_are_the_same(tmp_path: Path, mode: str) -> None:
    kit = RunKit.make(tmp_path)
    make_tiny_model(tmp_path / "model", hidden_size=1024)
    weights = (tmp_path / "model" / "model.safetensors").stat().st_size
    form = {
        "num_rollout": 4,
        "eval_prompt_data": ("held", "prompts.jsonl@[0:4]"),
        "eval_interval": 2,
        "save_interval": 2,
    }
    found = {}
    for name, changes in {"apart": {}, "turns": {"colocate": True}}.items():
        run = kit.start(kit.arguments(name, update_weight_mode=mode, **form, **changes))
        run.until(run.processes)
        watch = Watch(run)
        watch.start()
        assert run.wait() == 0, run.output
        watch.join()
        found[name] = run, np.array(watch.seen)
    (apart, _), (turns, seen) = found["apart"], found["turns"]
    for ours, theirs in zip(turns.metrics(), apart.metrics(), strict=True):
        for key in ("train/loss", "train/grad_norm", "rollout/reward", "eval/held/reward"):
            assert ours.get(key) == pytest.approx(theirs.get(key), abs=1e-6), key
    ours, theirs = (load_file(run.folder / "model" / "model.safetensors") for run in (turns, apart))
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, atol=1e-6)
    most, least = seen.max(axis=0), seen.min(axis=0)
    assert most[0] - least[0] > 0.9 * 4 * weights, "weights, gradients, two moments"
    assert most[1] - least[1] > 0.9 * weights
    together = seen.sum(axis=1).max()
    assert together < most.sum() - 0.8 * weights, "never both"


@pytest.mark.parametrize("role", weekly(["trainer", "engine", "driver", "rollout_worker"], 2))
def test_a_kill_in_turns_loses_no_group_and_trains_none_twice(kit: RunKit, role: str) -> None:
    outcome = kill_and_resume(kit, role, 0, steps=6, **TURNS)
    assert outcome.ok, str(outcome)


def test_one_of_two_engines_may_die_in_any_turn(kit: RunKit) -> None:
    outcome = disturb_an_engine(kit, 0, steps=6, fault="kill", **TURNS)
    assert outcome.ok, str(outcome)
