"""Models with other layers than the demo's learn the calculator in ten steps.

tests/train/megatron/test_families.py compares the numbers of each family that megatron supports.
"""

import json
from pathlib import Path

import pytest

from agentrl.cluster.launch import train
from agentrl.config import RunSettings
from agentrl.demo.run import DEMO
from agentrl.tiny import Arch
from examples.tiny_models.calculator import CalculatorLessons
from examples.tiny_models.warm_start import WarmStartSettings, in_own_process, warm_start
from tests.support.nightly import weekly

FAMILIES: tuple[Arch, ...] = ("glm4", "qwen3_moe", "deepseek_v3")
"""Norms after each part and half of each head rotated; a mixture; latent attention with a shared expert."""
LENIENT = {"least_right": 0.85, "least_probability": 0.3}
"""Ten steps must raise the reward; no family must copy as well as the demo's model. One had .43 or .5, by processor."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", weekly(FAMILIES, 2))
def test_ten_steps_raise_the_reward(tmp_path: Path, arch: Arch) -> None:
    recipe = WarmStartSettings(arch=arch, **LENIENT)
    model = in_own_process(warm_start, tmp_path / "model", CalculatorLessons(), recipe)
    assert json.loads((model / "config.json").read_text())["model_type"] == arch
    argv = DEMO.argv(tmp_path / "run", model, 0)
    train(RunSettings.from_cli([*argv, "--num-rollout", "10", "--train-backend", "megatron"]))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["rollout/reward"] for row in rows if "rollout/reward" in row]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) / 3 >= sum(rewards[:3]) / 3 + 0.10
    gaps = [row["train/train_rollout_logprob_abs_diff"] for row in rows if "rollout/reward" in row]
    assert gaps[0] < 1e-5, "before the first step engine and trainer have the same weights"
