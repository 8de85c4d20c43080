"""LoRA: trained parameters, saving, merging and exclusions, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentrl.algorithms import AlgorithmSettings
from agentrl.errors import CheckpointError
from agentrl.lora import LoraShape, pairs, read_adapter, start, write_adapter
from agentrl.train.settings import TrainSettings
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import PPO, backend, make_batch, settings

KL = AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "qwen3")


def adapted(folder: Path, **changes: Any) -> TrainSettings:
    return settings(folder, train_backend="fsdp", lora_rank=4, lora_alpha=6.0, lr=1e-2, **changes)


def test_an_adapter_learns_and_is_merged_saved_and_switched_off(folder: Path, tmp_path: Path) -> None:
    batch = make_batch()
    with backend(adapted(folder), KL) as made:
        before = made.log_probs(batch)
        metrics = [made.train(batch, number) for number in range(2)]
        assert metrics[0]["kl_loss"] == 0
        assert abs(metrics[1]["kl_loss"]) > 1e-4
        after = made.log_probs(batch)
        np.testing.assert_array_equal(made.log_probs(batch, "ref"), before)
        assert np.abs(after - before).max() > 0.1
        made.save_hf(tmp_path / "model")
        made.save_hf(tmp_path / "adapter", served=True)
        made.save(tmp_path / "checkpoint", 2)
    with backend(settings(tmp_path / "model", train_backend="fsdp")) as merged:
        np.testing.assert_allclose(merged.log_probs(batch), after, rtol=0, atol=1e-5)
    with backend(adapted(folder)) as resumed:
        assert resumed.load(tmp_path / "checkpoint") == 2
        np.testing.assert_array_equal(resumed.log_probs(batch), after)
    with backend(settings(folder, train_backend="fsdp")) as other, pytest.raises(CheckpointError, match="lora_rank"):
        other.load(tmp_path / "checkpoint")

    shape, tensors = read_adapter(tmp_path / "adapter")
    assert (shape.rank, shape.alpha) == (4, 6.0)
    assert "q_proj" in shape.targets
    assert "lm_head" not in shape.targets
    assert (tmp_path / "model/adapter/adapter_model.safetensors").read_bytes() == (
        tmp_path / "adapter/adapter_model.safetensors"
    ).read_bytes()
    plain, learnt = load_file(folder / "model.safetensors"), load_file(tmp_path / "model/model.safetensors")
    for layer, a, b in pairs(tensors):
        torch.testing.assert_close(learnt.pop(f"{layer}.weight"), plain[f"{layer}.weight"] + 1.5 * b @ a)
    assert all(torch.equal(tensor, plain[name]) for name, tensor in learnt.items())
    assert len(learnt) < len(plain)


@pytest.mark.parametrize("offload", [False, True])
def test_in_half_precision_only_what_learns_is_kept_in_float32(folder: Path, tmp_path: Path, offload: bool) -> None:
    """Also with weights in host memory; saved and resumed to the bit."""
    batch = make_batch()
    with backend(adapted(folder)) as made:
        exact = made.log_probs(batch)
    with backend(adapted(folder, bf16=True, fsdp_cpu_offload=offload)) as made:
        kinds = {name: (p.requires_grad, p.dtype) for name, p in made.actor.network.parameters().items()}
        assert {kind for name, kind in kinds.items() if "lora_" in name} == {(True, torch.float32)}
        assert {kind for name, kind in kinds.items() if "lora_" not in name} == {(False, torch.bfloat16)}
        before = made.log_probs(batch)
        assert 0 < np.abs(before - exact).max() < 0.2
        made.train(batch, 0)
        after = made.log_probs(batch)
        assert np.abs(after - before).max() > 0.01
        made.save(tmp_path / "checkpoint", 1)
        made.save_hf(tmp_path / "model")
    with backend(adapted(folder, bf16=True, fsdp_cpu_offload=offload)) as resumed:
        assert resumed.load(tmp_path / "checkpoint") == 1
        np.testing.assert_array_equal(resumed.log_probs(batch), after)


def test_a_critic_beside_an_adapter_learns_whole(folder: Path) -> None:
    with backend(adapted(folder, target_modules=("q_proj", "mlp.up_proj")), PPO) as made:
        made.train(make_batch(), 0)
        assert made.critic is not None
        assert not made.critic.network.adapter()
        assert {name.split(".")[-3] for name in made.actor.network.adapter()} == {"q_proj", "up_proj"}
    wrong = pytest.raises(CheckpointError, match="'q' is no linear layer of the model; it has .*q_proj")
    with wrong, backend(adapted(folder, target_modules=("q",))):
        pass


def test_foreign_adapters_are_read_and_other_kinds_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")  # if it is installed, it is the reference
    from transformers import AutoModelForCausalLM

    folder, batch = make_tiny_model(tmp_path / "model"), make_batch()
    with backend(adapted(folder)) as made:
        made.train(batch, 0)
        made.save_hf(tmp_path / "ours", served=True)
        made.save_hf(tmp_path / "merged")
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "ours").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(10, 40)[None]
    torch.testing.assert_close(theirs(ids).logits, merged(ids).logits, rtol=0, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, again = read_adapter(tmp_path / "ours"), read_adapter(tmp_path / "theirs")
    assert ours[0].rank == again[0].rank
    assert ours[1].keys() == again[1].keys()


@pytest.mark.parametrize(
    ("change", "reason"), [({"use_dora": True}, "got use_dora"), ({"peft_type": "IA3"}, "got peft_type 'IA3'")]
)
def test_what_is_no_plain_lora_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    import json

    tensors = {"l.q.lora_A.weight": torch.ones(2, 3), "l.q.lora_B.weight": torch.ones(4, 2)}
    write_adapter(tmp_path, tensors, LoraShape(2, 4.0, ("q",)), tmp_path)
    assert [layer for layer, _, _ in pairs(read_adapter(tmp_path)[1])] == ["l.q"]
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=reason):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("l.q.lora_B.bias", "base_model.model.l.q.lora_B.bias"),
        ("l.embed.weight", "base_model.model.l.embed.weight"),
        ("l.k.lora_A.weight", "base_model.model.l.k.lora_B.weight"),
    ],
)
def test_tensors_without_a_pair_are_refused(tmp_path: Path, extra: str, reason: str) -> None:
    """PEFT writes a bias with `lora_bias`, and embeddings with a larger vocabulary."""
    names = ["l.q.lora_A.weight", "l.q.lora_B.weight", extra]
    write_adapter(tmp_path, {name: torch.ones(2, 2) for name in names}, LoraShape(2, 4.0, ("q",)), tmp_path)
    with pytest.raises(CheckpointError, match=f"expected pairs .* see {reason}"):
        read_adapter(tmp_path)


def test_each_layers_adapter_starts_with_numbers_of_its_own() -> None:
    first, second, again = start("layers.0.q", 4, 8, 1), start("layers.1.q", 4, 8, 1), start("layers.0.q", 4, 8, 1)
    assert not torch.equal(first, second)
    assert not torch.equal(first, start("layers.0.q", 4, 8, 2))
    assert torch.equal(first, again)
