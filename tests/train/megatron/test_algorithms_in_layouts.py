"""Every algorithm without a critic in every layout: the same losses, gradients and statistics as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algorithms import AlgorithmSettings
from agentrl.train.contracts import RankInfo
from tests.support.distributed import run_ranks
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import backend, make_batch, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_UNBIASED = {"use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": "k3", "use_unbiased_kl": True}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_denominator": "constant", "loss_max_length": 50, **_UNBIASED},
    "gspo": {"eps_clip": 0.01, "loss_denominator": "all", "kl_coef": 0.1},
    "cispo": {"eps_clip": 1.0, "eps_clip_high": 0.1, "calculate_per_token_loss": True, "entropy_coef": 0.01},
    "rloo": {"kl_coef": 0.1, "kl_loss_type": "k3", "eps_clip_c": 3.0},
    "reinforce_plus_plus": {"kl_coef": 0.1, "gamma": 0.99},
    "reinforce_plus_plus_baseline": {"overlong_buffer_len": 20, "loss_max_length": 40},
    "on_policy_distillation": {"opd_kl_coef": 0.7, "normalize_advantages": True},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
    "dp2_sharded": {"use_distributed_optimizer": True},
}
LAYOUTS_OWN = ("train_seconds", "tokens_share")
"""Ends of the names of metrics that say how a layout computes."""
STEPS = {"grpo": 3}
"""Optimizer steps a rollout, otherwise two."""


def trained(root: str, name: str, rank: RankInfo, **layout: Any) -> list[dict[str, float]]:
    """Two rollouts with gradient clipping and weight decay."""
    if name == "on_policy_distillation":
        layout["opd_teacher_load"] = f"{root}/teacher"
    chosen = settings(
        Path(root) / "m", num_steps_per_rollout=STEPS.get(name, 2), clip_grad=0.1, weight_decay=0.1, **layout
    )
    with backend(chosen, AlgorithmSettings(advantage_estimator=name, **ALGORITHMS[name]), rank) as made:
        return [dict(made.train(make_batch(seed=seed), 3 * seed)) for seed in range(2)]


def in_two_processes(rank: int, root: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2)
    where = RankInfo(rank, 2, rank)
    return {f"{a}/{b}": trained(root, a, where, **layout) for a in ALGORITHMS for b, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("algorithms")
    make_tiny_model(path / "m", "qwen3", tie_word_embeddings=False)
    make_tiny_model(path / "teacher", "llama", layers=4, seed=3)
    return str(path)


@pytest.fixture(scope="module")
def double(root: str) -> dict[str, Any]:
    first: dict[str, Any] = run_ranks(in_two_processes, 2, root, timeout=800)[0]
    return first


@pytest.mark.parametrize("name", ALGORITHMS)
def test_same_numbers_as_one_process(root: str, double: dict[str, Any], name: str) -> None:
    want = trained(root, name, RankInfo())
    assert all(step["grad_norm"] > 0 for step in want)
    assert any(abs(step["ppo_kl"]) > 1e-5 for step in want)
    for layout in LAYOUTS:
        for ours, theirs in zip(double[f"{name}/{layout}"], want, strict=True):
            assert ours.keys() == theirs.keys()
            for key in (key for key in theirs if not key.endswith(LAYOUTS_OWN)):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), f"{layout}: {key}"
