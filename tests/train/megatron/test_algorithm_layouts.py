"""Every algorithm in every layout against one process: losses and gradient norms, several steps a rollout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algorithms import AlgorithmSettings
from agentrl.algorithms.registry import ESTIMATORS
from agentrl.train.batch import TrainBatch
from agentrl.train.contracts import RankInfo
from agentrl.train.settings import TrainSettings
from tests.support.distributed import run_ranks
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron import test_layouts
from tests.train.megatron.helpers import backend, make_batch, settings, timeless

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": "k3", "use_unbiased_kl": True},
    "grpo-dr": {
        "advantage_estimator": "grpo", "grpo_std_normalization": False, "loss_denominator": "constant",
        "loss_max_length": 50,
    },
    "grpo-dapo": {
        "advantage_estimator": "grpo", "eps_clip_high": 0.28, "calculate_per_token_loss": True,
        "overlong_buffer_len": 20, "loss_max_length": 40,
    },
    "grpo-tis": {"advantage_estimator": "grpo", "use_tis": True, "tis_level": "geometric", "use_opsm": True},
    "gspo": {"eps_clip": 0.01, "loss_denominator": "all", "kl_coef": 0.1},
    "cispo": {"eps_clip": 1.0, "eps_clip_high": 0.1, "calculate_per_token_loss": True, "entropy_coef": 0.01},
    "sapo": {"sapo_tau_positive": 5.0},
    "dppo": {"dppo_threshold": 0.01},
    "gmpo": {"eps_clip": 0.05},
    "gdpo": {"gdpo_weights": {"a": 1.0, "b": 0.5}},
    "pass_at_k": {"pass_k": 2},
    "grpo-clip-cov": {
        "advantage_estimator": "grpo", "entropy_control": "clip", "covariance_low": 0.0, "covariance_ratio": 0.1,
        "entropy_target": 99.0, "entropy_coef": 0.001,
    },
    "grpo-kl-cov": {"advantage_estimator": "grpo", "entropy_control": "kl", "covariance_ratio": 0.1},
    "rloo": {"kl_coef": 0.1, "kl_loss_type": "k3", "eps_clip_c": 3.0},
    "reinforce_plus_plus": {"kl_coef": 0.1, "gamma": 0.99},
    "reinforce_plus_plus_baseline": {"use_opsm": True},
    "ppo": {"gamma": 0.99, "lambd": 0.9, "kl_coef": 0.05, "value_clip": 0.01},
    "on_policy_distillation": {"opd_kl_coef": 0.7, "normalize_advantages": True},
}  # fmt: skip
LAYOUTS = {name: test_layouts.LAYOUTS[name] for name in test_layouts.EXACT}
OF_FOUR: dict[str, dict[str, Any]] = {
    "tp2_cp2": {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True},
    "pp2_dp2_sharded": {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
}
LAYOUTS_OWN = "tokens_share"
"""Suffixes of metrics that depend on how a layout computes."""
SLICE = ("cp2",)
"""The layout of the everyday tests; it splits samples among ranks."""

Key = tuple[str, str, int]

pytestmark = pytest.mark.timeout(900)


def ranks(world: int, root: str, layouts: dict[str, Any], steps: tuple[int, ...], timeout: float) -> dict[Key, Any]:
    """Return what rank 0 of `world` processes measured."""
    first: dict[Key, Any] = run_ranks(train, world, world, root, layouts, steps, timeout=timeout)[0]
    return first


def algorithm(name: str) -> AlgorithmSettings:
    return AlgorithmSettings(**{"advantage_estimator": name, **ALGORITHMS[name]})


def chosen(root: str, name: str, steps: int, **changes: Any) -> TrainSettings:
    """Return settings with clipped gradients, weight decay and several steps a rollout."""
    if name == "on_policy_distillation":
        changes["opd_teacher_load"] = f"{root}/teacher"
    changes = {"clip_grad": 0.05, "weight_decay": 0.1, "num_steps_per_rollout": steps} | changes
    return settings(Path(root) / "m", **changes)


def rollout(number: int) -> TrainBatch:
    """Make the batch of a rollout, with a second reward of another scale."""
    batch = make_batch(seed=number)
    return replace(batch, reward_parts=np.stack([batch.rewards, 100 * np.cos(np.arange(len(batch)))], 1))


def train(rank: int, world: int, root: str, layouts: dict[str, Any], steps: tuple[int, ...]) -> dict[Key, Any]:
    """Train two rollouts of every algorithm in every layout."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{root}/{world}-{len(layouts)}", rank=rank, world_size=world
    )
    out: dict[Key, Any] = {}
    for name in ALGORITHMS:
        for layout, changes in layouts.items():
            for count in steps:
                with backend(
                    chosen(root, name, count, **changes), algorithm(name), RankInfo(rank, world, rank)
                ) as made:
                    out[name, layout, count] = [dict(made.train(rollout(i), i)) for i in range(2)]
    return out


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("algorithms")
    make_tiny_model(path / "m", "qwen3", tie_word_embeddings=True)
    make_tiny_model(path / "teacher", "llama", layers=4, seed=3)
    return str(path)


@pytest.fixture(scope="module")
def one(root: str) -> dict[Key, Any]:
    return ranks(1, root, {"one": {}}, (2,), 300)


def check(want: list[dict[str, float]], got: list[dict[str, float]]) -> None:
    assert all(ours["grad_norm"] > 0 for ours in want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys()
        for key in (key for key in timeless(theirs) if not key.endswith(LAYOUTS_OWN)):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), key


def test_every_estimator_is_here() -> None:
    named = {ALGORITHMS[name].get("advantage_estimator", name) for name in ALGORITHMS}
    assert set(ESTIMATORS) <= named


@pytest.fixture(scope="module")
def cut_apart(root: str) -> dict[Key, Any]:
    return ranks(2, root, {name: LAYOUTS[name] for name in SLICE}, (2,), 300)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_samples_may_be_cut_apart(one: dict[Key, Any], cut_apart: dict[Key, Any], name: str) -> None:
    for layout in SLICE:
        check(one[name, "one", 2], cut_apart[name, layout, 2])


@pytest.mark.slow
class TestEverywhere:
    @pytest.fixture(scope="class")
    def alone(self, root: str) -> dict[Key, Any]:
        return ranks(1, root, {"one": {}, "again": {}}, (2, 3), 400)

    @pytest.fixture(scope="class")
    def double(self, root: str) -> dict[Key, Any]:
        return ranks(2, root, LAYOUTS, (2, 3), 850)

    @pytest.fixture(scope="class")
    def fourfold(self, root: str) -> dict[Key, Any]:
        return ranks(4, root, OF_FOUR, (2,), 850)

    @pytest.mark.parametrize("steps", [2, 3])
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_two_processes(
        self, alone: dict[Key, Any], double: dict[Key, Any], name: str, layout: str, steps: int
    ) -> None:
        check(alone[name, "one", steps], double[name, layout, steps])

    @pytest.mark.parametrize("layout", OF_FOUR)
    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_four_processes(self, alone: dict[Key, Any], fourfold: dict[Key, Any], name: str, layout: str) -> None:
        check(alone[name, "one", 2], fourfold[name, layout, 2])
