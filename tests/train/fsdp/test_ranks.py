"""Two processes of FSDP: Megatron's numbers of one process, and checkpoints that resume in other shards, or in none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algorithms import AlgorithmSettings
from agentrl.errors import CheckpointError
from agentrl.train.contracts import RankInfo
from agentrl.train.settings import TrainSettings
from tests.support.distributed import run_ranks
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import PPO, backend, make_batch, settings, timeless

KL = AlgorithmSettings(use_kl_loss=True, entropy_coef=0.01)
CASES: dict[str, tuple[AlgorithmSettings, dict[str, Any]]] = {
    "shards": (KL, {}),
    "copies": (KL, {"data_parallel_replicate_degree": 2}),
    "offload": (KL, {"fsdp_cpu_offload": True}),
    "recomputed": (
        KL,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "critic": (PPO, {"async_save": True}),
    "adapter": (KL, {"lora_rank": 4, "lora_alpha": 8.0}),
    "bf16": (KL, {"bf16": True}),
}
SAVED = ("shards", "critic")
STEPS = 2


def chosen(root: str | Path, **changes: Any) -> TrainSettings:
    common = {"weight_decay": 0.1, "clip_grad": 0.05, "train_backend": "fsdp", "ref_update_interval": STEPS}
    return settings(Path(root) / "model", **{**common, **changes})


def played(made: Any) -> dict[str, Any]:
    """Return log-probs before, metrics of the steps, and weights after (on rank 0)."""
    batch = make_batch()
    before = made.log_probs(batch)
    metrics = [timeless(made.train(batch, number)) for number in range(STEPS)]
    weights = {name: tensor.float().cpu().numpy().copy() for name, tensor in made.export_weights()}
    return {"log_probs": before, "metrics": metrics, "weights": weights}


def next_step(made: Any) -> dict[str, float]:
    return timeless(made.train(make_batch(seed=1), STEPS))


def in_two_processes(rank: int, root: str, names: tuple[str, ...]) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2)
    out: dict[Any, Any] = {}
    for name in names:
        algorithm, changes = CASES[name]
        with backend(chosen(root, **changes), algorithm, RankInfo(rank, 2, rank)) as made:
            out[name] = played(made)
            if name in SAVED:
                made.save(f"{root}/two/{name}", STEPS)
                assert made.saved()
                made.offload()
                made.onload()
                out[name, "next"] = next_step(made)
                assert made.load(f"{root}/one/{name}") == STEPS
                out[name, "resumed"] = next_step(made)
    return out


def near(one: dict[str, float], other: dict[str, float], rel: float = 1e-5) -> None:
    shares = {"computed_tokens_share", "copied_tokens_share"}  # tokens that two processes compute twice
    assert one.keys() == other.keys()
    kept = one.keys() - shares
    assert {name: one[name] for name in kept} == pytest.approx({name: other[name] for name in kept}, rel=rel, abs=rel)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "names",
    [("shards",), pytest.param(tuple(CASES), marks=pytest.mark.slow)],
    ids=lambda names: f"{len(names)} layouts",
)
def test_two_processes_are_one(tmp_path: Path, names: tuple[str, ...]) -> None:
    make_tiny_model(tmp_path / "model")
    want: dict[Any, Any] = {}
    saved = [name for name in SAVED if name in names]
    for name in saved:
        with backend(chosen(tmp_path, train_backend="megatron"), CASES[name][0]) as made:
            want[name] = played(made)
        with backend(chosen(tmp_path), CASES[name][0]) as made:
            played(made)
            made.save(tmp_path / "one" / name, STEPS)
            want[name, "next"] = next_step(made)
    if "adapter" in names:
        with backend(chosen(tmp_path, **CASES["adapter"][1]), KL) as made:
            want["adapter"] = played(made)
    found, other = run_ranks(in_two_processes, 2, str(tmp_path), names)
    for name in names:
        theirs, rel = want.get(name, want["shards"]), 2e-2 if name == "bf16" else 1e-5
        np.testing.assert_allclose(found[name]["log_probs"], theirs["log_probs"], rtol=0, atol=10 * rel)
        np.testing.assert_array_equal(found[name]["log_probs"], other[name]["log_probs"])
        assert found[name]["metrics"][-1]["loss"] == other[name]["metrics"][-1]["loss"]
        assert other[name]["weights"] == {}
        if name != "bf16":
            for ours, metrics in zip(found[name]["metrics"], theirs["metrics"], strict=True):
                near(ours, metrics)
        for tensor, value in found[name]["weights"].items():
            np.testing.assert_allclose(value, theirs["weights"][tensor], rtol=0, atol=2 * rel, err_msg=tensor)
    for name in saved:
        near(found[name, "next"], want[name, "next"])
        near(found[name, "resumed"], want[name, "next"])
        with backend(chosen(tmp_path), CASES[name][0]) as made:
            assert made.load(tmp_path / "two" / name) == STEPS
            near(next_step(made), want[name, "next"])
    with backend(chosen(tmp_path, train_backend="megatron"), KL) as made, pytest.raises(CheckpointError, match="fsdp"):
        made.load(tmp_path / "two" / "shards")


@pytest.mark.slow
def test_two_processes_train_layers_with_a_state_and_recompute_them(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "qwen3_next")
    with backend(chosen(tmp_path), KL) as made:
        want = played(made)
    found, _ = run_ranks(in_two_processes, 2, str(tmp_path), ("recomputed",))
    np.testing.assert_allclose(found["recomputed"]["log_probs"], want["log_probs"], rtol=0, atol=1e-5)
    for ours, theirs in zip(found["recomputed"]["metrics"], want["metrics"], strict=True):
        near(ours, theirs)
    for name, value in found["recomputed"]["weights"].items():
        np.testing.assert_allclose(value, want["weights"][name], rtol=0, atol=2e-5, err_msg=name)
