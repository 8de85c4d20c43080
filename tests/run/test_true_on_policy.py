"""`--true-on-policy-mode`: engine and trainer agree to the bit, runs repeat to the bit, one wrong bit ends a run."""

from pathlib import Path

import pytest

from agentrl.config import RunSettings
from agentrl.errors import SettingsError
from tests.config.toggles import BASE
from tests.support.nightly import nightly
from tests.support.produced import produced, settings_of
from tests.support.runs import RunKit
from tests.support.tiny_models import Arch, make_tiny_model

PLANTED = """
import numpy as np


async def reward(args, sample):
    if sample.index == 5:
        lowest = np.nextafter(np.float32(sample.rollout_log_probs[0]), np.float32(-99))
        sample.rollout_log_probs[0] = float(lowest)
    return float(sample.index % 2)
"""
BUSY = f"{BASE} --true-on-policy-mode --rollout-max-concurrency 8 --rollout-temperature 0.7"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    RunKit.make(tmp_path, prompts=8)
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("arch", nightly(["qwen3", "qwen2", "llama"], 1))
def test_engine_and_trainer_agree_to_the_bit_and_runs_repeat(desk: Path, arch: Arch) -> None:
    make_tiny_model(desk / "model", arch=arch)
    packed = "--use-dynamic-batch-size --max-tokens-per-gpu 4096"
    once = produced(BUSY, packed)
    assert once["failed"] == ""
    assert [row["train/train_rollout_logprob_abs_diff"] for row in once["metrics"]] == [0.0, 0.0]
    # An engine with one sequence at a time computes the same.
    if arch == "qwen3":
        again = produced(BUSY, packed, "--rollout-max-concurrency 1")
        assert [again[name] for name in ("trajectories", "weights")] == [once["trajectories"], once["weights"]]


def test_one_planted_bit_ends_the_run_before_the_step(desk: Path) -> None:
    planted = produced(BUSY, "--custom-rm-path planted.py:reward")
    assert planted["failed"].startswith("TrainError")
    assert len(planted["metrics"]) == 1, "the first rollout was trained, and the second left out"


@pytest.mark.slow
def test_only_the_first_of_several_steps_is_compared_with_the_engine(desk: Path) -> None:
    assert produced(BUSY, "--num-steps-per-rollout 2 --use-rollout-logprobs --lr 0.1")["failed"] == ""


@pytest.mark.slow
def test_the_gate_alone_has_a_threshold(desk: Path) -> None:
    strict = "--ci-train-rollout-logprob-abs-diff-threshold"
    assert produced(BASE, f"{strict} 0")["failed"].startswith("TrainError")
    assert produced(BASE, f"{strict} 1e-4")["failed"] == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--max-staleness 1", "use --max-staleness 0"),
        ("--rollout-top-p 0.9", "leave --rollout-top-p"),
        ("--engine sglang", "use --engine embedded"),
        ("--backend ray --context-parallel-size 2 --actor-num-gpus-per-node 2", "--context-parallel-size above 1"),
    ],
)
def test_what_cannot_agree_is_refused(desk: Path, flags: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        settings_of(BASE, "--true-on-policy-mode", flags)


def test_the_mode_says_what_it_means_to_trainer_and_engine() -> None:
    settings = RunSettings.from_flat({"true_on_policy_mode": True})
    assert settings.engine.embedded_deterministic
    assert not settings.train.share_prefixes
    assert settings.train.ci_train_rollout_logprob_abs_diff_threshold == 0
