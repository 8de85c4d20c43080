"""slime's hooks of training beside the built-in forms that they do again: values and gradients, in every layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from agentrl.config import RunSettings
from agentrl.train.contracts import RankInfo
from agentrl.train.hooks import hooks_of
from agentrl.train.megatron.backend import MegatronBackend
from tests.compat.training import examples
from tests.support.distributed import run_ranks
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import TEMPERATURE, gradients, make_batch, settings

LOSS, TIS, REDUCER = (f"custom_{name}_function_path" for name in ("loss", "tis", "pg_loss_reducer"))


def path(name: str) -> str:
    return f"{examples.__name__}:{name}"


HOOKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "advantages": ({}, {"compat_options": {"custom_advantage_function_path": path("grpo")}}),
    "loss": ({}, {"loss_type": "custom_loss", LOSS: path("clipped")}),
    "loss per token": (
        {"calculate_per_token_loss": True},
        {"calculate_per_token_loss": True, "loss_type": "custom_loss", LOSS: path("clipped")},
    ),
    "weights": ({"use_tis": True, "tis_clip": 1.1}, {"use_tis": True, "tis_clip": 1.1, TIS: path("truncated")}),
    "rejection": (
        {"use_rs": True, "rs_level": "geometric", "rs_upper_bound": 30.0},
        {"use_tis": True, "use_rs": True, "rs_upper_bound": 30.0, TIS: path("rejecting")},
    ),
    "reducer": (
        {"loss_denominator": "all", "entropy_coef": 0.1},
        {"loss_denominator": "all", "entropy_coef": 0.1, REDUCER: path("sample_means")},
    ),
}
"""The settings of a built-in form, and those of the hook that does it again."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {},
}

Found = tuple[list[dict[str, float]], dict[str, NDArray[np.float32]]]


@contextlib.contextmanager
def backend(
    root: Path, algorithm: dict[str, Any], where: RankInfo | None = None, **train: Any
) -> Iterator[MegatronBackend]:
    chosen = settings(root / "m", clip_grad=0.0, **train).model_dump(exclude_defaults=True)
    place = {"rollout_temperature": TEMPERATURE, "actor_num_gpus_per_node": where.world_size if where else 1}
    run = RunSettings.from_flat({**chosen, **algorithm, **place})
    made = MegatronBackend(
        run.train, run.algorithm, rollout_temperature=TEMPERATURE, device="cpu", hooks=hooks_of(run.args)
    )
    try:
        made.init(where or RankInfo())
        yield made
    finally:
        made.close()


def trained(root: Path, algorithm: dict[str, Any], where: RankInfo | None = None, **train: Any) -> Found:
    """Two rollouts of two steps; the metrics, and the last gradients."""
    with backend(root, algorithm, where, num_steps_per_rollout=2, **train) as made:
        metrics = [dict(made.train(make_batch(seed=i), 2 * i)) for i in range(2)]
        return metrics, {name: value.clone().numpy() for name, value in gradients(made)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hooks")
    make_tiny_model(folder / "m", "qwen3")
    return folder


@pytest.fixture(scope="module")
def built_in(root: Path) -> dict[str, Found]:
    return {name: trained(root, algorithm) for name, (algorithm, _) in HOOKED.items()}


def check(want: Found, got: Found) -> None:
    for ours, theirs in zip(want[0], got[0], strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-6, abs=1e-6)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-5)
        assert theirs["ppo_kl"] == pytest.approx(ours["ppo_kl"], rel=1e-5, abs=1e-6)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        np.testing.assert_allclose(got[1][name], gradient, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", HOOKED)
def test_what_a_hook_does_again_is_the_same(root: Path, built_in: dict[str, Found], name: str) -> None:
    check(built_in[name], trained(root, HOOKED[name][1]))


def of_layouts(rank: int, world: int, root: Path) -> dict[tuple[str, str], Found]:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/{world}", rank=rank, world_size=world)
    cases = [(name, layout) for name in HOOKED for layout in LAYOUTS if name in EVERYWHERE or layout == "cp2"]
    return {
        (name, layout): trained(root, HOOKED[name][1], RankInfo(rank, world, rank), **LAYOUTS[layout])
        for name, layout in cases
    }


EVERYWHERE = ("loss", "rejection")


def test_a_hook_sees_whole_samples_in_every_layout(root: Path, built_in: dict[str, Found]) -> None:
    for (name, layout), found in run_ranks(of_layouts, 2, 2, root)[0].items():
        try:
            check(built_in[name], found)
        except AssertionError as error:
            raise AssertionError(f"{name}, {layout}: {error}") from error
