"""LoRA with Megatron: FSDP's numbers and folders on one process, and the same on two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algorithms import AlgorithmSettings
from agentrl.config.inapplicable import inapplicable
from agentrl.errors import CheckpointError, SettingsError, TrainError
from agentrl.lora import read_adapter
from agentrl.modelfolder import read_config
from agentrl.train.contracts import RankInfo
from agentrl.train.fsdp.network import FsdpNetwork
from agentrl.train.hf import HFFolder
from agentrl.train.megatron.folder import opened
from agentrl.train.megatron.network import MegatronNetwork
from agentrl.train.network import Network
from agentrl.train.settings import TrainSettings
from tests.support.distributed import run_ranks
from tests.support.produced import settings_of
from tests.support.tiny_models import Arch, make_tiny_model
from tests.train.megatron.helpers import backend, make_batch, settings, timeless

KL = AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.1)
STEPS = 2
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, tuple[Arch, dict[str, Any]]] = {
    "tp2": ("qwen3", {"tensor_model_parallel_size": 2}),
    "tp2_sp": ("qwen3", {"tensor_model_parallel_size": 2, "sequence_parallel": True, **RECOMPUTED}),
    "pp2": ("qwen3", {"pipeline_model_parallel_size": 2}),
    "dp2_sharded": ("qwen3", {"use_distributed_optimizer": True}),
    "tp2_bf16": ("qwen3", {"tensor_model_parallel_size": 2, "bf16": True, "use_distributed_optimizer": True}),
    "tp2_joined": ("glm4", {"tensor_model_parallel_size": 2}),
    "tp2_latent": ("deepseek_v3", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "ep2": ("deepseek_v3", {"expert_model_parallel_size": 2}),
}


def adapted(folder: Path, **changes: Any) -> TrainSettings:
    chosen = {"weight_decay": 0.1, "clip_grad": 0.05, "lr": 1e-2, "lora_rank": 4, "lora_alpha": 6.0}
    return settings(folder, **{**chosen, **changes})


def played(made: Any, first: int = 0) -> dict[str, Any]:
    """Return log-probs before, metrics of the steps, the adapter and, on rank 0, the weights after."""
    batch = make_batch()
    before = made.log_probs(batch)
    metrics = [timeless(made.train(batch, first + number)) for number in range(STEPS)]
    adapter = {name: tensor.cpu().float().numpy().copy() for name, tensor in made.actor.network.adapter().items()}
    weights = {name: tensor.cpu().float().numpy().copy() for name, tensor in made.export_weights()}
    return {"log_probs": before, "metrics": metrics, "adapter": adapter, "weights": weights}


def near(ours: dict[str, Any], theirs: dict[str, Any], atol: float = 1e-5) -> None:
    np.testing.assert_allclose(ours["log_probs"], theirs["log_probs"], rtol=0, atol=atol)
    shares = {"computed_tokens_share", "copied_tokens_share"}  # tokens that two processes compute twice
    for one, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        wanted = {name: value for name, value in other.items() if name not in shares}
        assert {name: one[name] for name in wanted} == pytest.approx(wanted, rel=atol, abs=atol)
    for what in ("adapter", "weights"):
        assert ours[what].keys() == theirs[what].keys()
        for name, value in ours[what].items():
            np.testing.assert_allclose(value, theirs[what][name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    "arch", ["qwen3", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("glm4", "deepseek_v3", "qwen3_moe"))]
)
def test_numbers_adapters_and_weights_are_fsdps(tmp_path: Path, arch: Arch) -> None:
    folder, found = make_tiny_model(tmp_path / arch, arch), {}
    for kind in ("fsdp", "megatron"):
        with backend(adapted(folder, train_backend=kind), KL) as made:
            found[kind] = played(made)
            made.save_hf(tmp_path / kind, served=True)
    near(found["megatron"], found["fsdp"])
    (theirs, tensors), (ours, learnt) = (read_adapter(tmp_path / kind) for kind in ("fsdp", "megatron"))
    assert (set(ours.targets), ours.scale) == (set(theirs.targets), theirs.scale)
    assert {name: (t.shape, t.dtype) for name, t in learnt.items()} == {
        n: (t.shape, t.dtype) for n, t in tensors.items()
    }


@pytest.mark.parametrize(("kind", "network"), [("fsdp", FsdpNetwork), ("megatron", MegatronNetwork)])
def test_names_of_layers_and_patterns_are_checked_without_weights(
    tmp_path: Path, kind: str, network: type[Network]
) -> None:
    folder = HFFolder(make_tiny_model(tmp_path / "qwen3"))
    with pytest.raises(CheckpointError, match="'qproj' is no linear layer of the model"):
        network.check_model(folder, adapted(folder.path, train_backend=kind, target_modules=("qproj",)), values=False)
    frozen = settings(folder.path, train_backend=kind, freeze_params_name_list=("no_such",))
    with pytest.raises(TrainError, match="no_such: no parameter is called so"):
        network.check_model(folder, frozen, values=False)


def test_what_gets_no_adapter_is_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "qwen3_moe", "qwen3_moe")
    chosen = pytest.raises(CheckpointError, match="'experts.0.up_proj' is no linear layer of the model")
    with chosen, backend(adapted(folder, target_modules=("q_proj", "experts.0.up_proj"))):
        pass
    with pytest.raises(SettingsError, match="--optimizer muon: adapters learn by adam"):
        settings_of("--lora-rank 4 --optimizer muon --train-backend megatron")
    with pytest.raises(SettingsError, match="--ref-update-interval: with --lora-rank the reference is fixed"):
        settings_of("--lora-rank 4 --use-kl-loss --ref-load other --ref-update-interval 2")
    flags = settings_of("--lora-rank 4 --train-backend megatron")
    assert not inapplicable(flags, "train")


@pytest.mark.parametrize("train_backend", ["fsdp", "megatron"])
def test_the_model_without_its_adapter_replays_no_routing(tmp_path: Path, train_backend: str) -> None:
    folder, batch = make_tiny_model(tmp_path / "model", "qwen3_moe"), make_batch()
    with backend(adapted(folder, train_backend=train_backend), KL) as made:
        config = read_config(folder)
        experts = np.zeros((1, config["num_hidden_layers"] * config["num_experts_per_tok"]), np.int16)
        experts[:, ::2] = 1
        routed = replace(batch, routed_experts=tuple(np.tile(experts, (int(n), 1)) for n in batch.lengths))
        assert np.abs(made.log_probs(routed) - made.log_probs(batch)).max() > 1e-3
        np.testing.assert_array_equal(made.log_probs(routed, "ref"), made.log_probs(batch, "ref"))


def in_two_processes(rank: int, root: str) -> dict[Any, Any]:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2)
    out: dict[Any, Any] = {}
    for name, (arch, changes) in LAYOUTS.items():
        with backend(adapted(Path(root, arch), **changes), KL, RankInfo(rank, 2, rank)) as made:
            out[name] = played(made)
            made.save(f"{root}/two/{name}", STEPS)
            made.offload()
            made.onload()
            if "sharded" not in name and "bf16" not in name:  # which have another kind of optimizer state
                assert made.load(f"{root}/one/{arch}") == STEPS
                out[name, "next"] = played(made, STEPS)
            else:
                next_one = played(made, STEPS)
                assert made.load(f"{root}/two/{name}") == STEPS
                near(played(made, STEPS), next_one)
    few = adapted(Path(root, "deepseek_v3"), pipeline_model_parallel_size=2, target_modules=("shared_experts.up_proj",))
    with pytest.raises(TrainError, match="stage 0 has no such layer"), backend(few, KL, RankInfo(rank, 2, rank)):
        pass
    return out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_are_one(tmp_path: Path) -> None:
    want: dict[Any, Any] = {}
    for arch in sorted({arch for arch, _ in LAYOUTS.values()}):
        with backend(adapted(make_tiny_model(tmp_path / arch, arch)), KL) as made:
            want[arch] = played(made)
            made.save(tmp_path / "one" / arch, STEPS)
            want[arch, "next"] = played(made, STEPS)
        with pytest.raises(CheckpointError, match="a checkpoint of an adapter alone; --save-hf writes its model"):
            opened(tmp_path / "one" / arch, tmp_path / arch)
    found, other = run_ranks(in_two_processes, 2, str(tmp_path))
    for name, (arch, _) in LAYOUTS.items():
        atol = 0.1 if "bf16" in name else 1e-5
        near(found[name], want[arch], atol)
        assert other[name]["weights"] == {}
        assert other[name]["adapter"].keys() == found[name]["adapter"].keys()
        if (name, "next") in found:
            near(found[name, "next"], want[arch, "next"])
            with backend(adapted(tmp_path / arch), KL) as made:
                assert made.load(tmp_path / "two" / name) == STEPS
                near(played(made, STEPS), want[arch, "next"])
