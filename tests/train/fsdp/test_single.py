"""FSDP's trainer in one process: Megatron's numbers if Megatron supports the family, else transformers' own."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.algorithms import AlgorithmSettings
from agentrl.config.inapplicable import inapplicable
from agentrl.errors import CheckpointError, SettingsError, TrainError
from agentrl.train.fsdp.model import Values, shape_of
from agentrl.train.fsdp.network import FsdpNetwork
from agentrl.train.hf import HFFolder
from tests.support.nightly import nightly
from tests.support.produced import settings_of
from tests.support.tiny_models import Arch, NoTable, make_tiny_model
from tests.train.megatron.helpers import PPO, Reference, backend, make_batch, settings, timeless


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    nightly(
        [
            (
                AlgorithmSettings(use_kl_loss=True, entropy_coef=0.01),
                {"clip_grad": 0.05, "weight_decay": 1.0, "ref_update_interval": 1},
            ),
            pytest.param(
                PPO,
                {"num_steps_per_rollout": 2, "critic_lr": 1e-3, "recompute_granularity": "selective"},
                marks=pytest.mark.slow,
            ),
            (AlgorithmSettings(), {"freeze_params_name_list": ("embed_tokens", "layers.0"), "ref_update_interval": 1}),
        ],
        1,
    ),
)
def test_numbers_and_weights_are_megatrons(folder: Path, algorithm: AlgorithmSettings, changes: dict[str, Any]) -> None:
    batch, found = make_batch(), list[Any]()
    for kind in ("megatron", "fsdp"):
        with backend(settings(folder, train_backend=kind, **changes), algorithm) as made:
            history = [made.log_probs(batch), *(timeless(made.train(batch, number)) for number in range(3))]
            found.append(
                (history, made.details(), made.weight_specs()[0], {n: t.clone() for n, t in made.export_weights()})
            )
    (theirs, their_details, their_specs, their_weights), (ours, details, specs, weights) = found
    np.testing.assert_allclose(ours[0], theirs[0], rtol=0, atol=1e-5)
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=2e-6)
    assert {name: array.dtype for name, array in details.items()} == {n: a.dtype for n, a in their_details.items()}
    assert sorted(specs) == sorted(their_specs)
    assert [spec.name for spec in specs] == list(weights)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, their_weights[name], rtol=0, atol=1e-5, msg=name)


DAILY = ["gpt_oss", "qwen3_next"]
NIGHTLY = [
    "gemma3_text",
    "granite",
    "lfm2",
    "gemma4_text",
    "smollm3",
    "qwen3_moe",
    "deepseek_v3",
    "minimax_m2",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "lfm2_moe",
]


@pytest.mark.parametrize(
    ("arch", "steps"),
    nightly([*((a, 2) for a in DAILY), *(pytest.param(a, 10, marks=pytest.mark.slow) for a in NIGHTLY)], 1),
)
def test_families_without_a_table_train_as_plain_torch(tmp_path: Path, arch: NoTable | Arch, steps: int) -> None:
    """Windows shorter than samples, sinks, fused experts, scaled logits, states: with packing and shared prefixes."""
    folder = make_tiny_model(tmp_path / arch, arch, tie_word_embeddings=arch == "granite")
    batch, algorithm = make_batch(), AlgorithmSettings()
    train = settings(folder, train_backend="fsdp", clip_grad=0.0, adam_eps=1e-3, lr=2e-3 / steps)
    reference = Reference(folder, train, algorithm)
    with backend(train, algorithm) as made:
        np.testing.assert_allclose(
            made.log_probs(batch), reference.log_probs(batch).detach().numpy(), rtol=0, atol=1e-5
        )
        for number in range(steps):
            want, metrics = reference.step(batch), made.train(batch, number)
            for name in ("loss", "grad_norm"):
                assert metrics[name] == pytest.approx(want[name], rel=2e-5, abs=1e-6), name
        reference.model.save_pretrained(tmp_path / "theirs")
        theirs = HFFolder(tmp_path / "theirs")
        stored = {name: list(made.folder.tensor(name).shape) for name in made.folder.files}
        assert {spec.name: spec.shape for spec in made.weight_specs()[0]} == stored
        for name, tensor in made.export_weights():
            torch.testing.assert_close(tensor.cpu(), theirs.tensor(name), rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("arch", nightly(["qwen3_moe", "deepseek_v3"], 1))
def test_grouped_products_are_as_one_expert_after_another(tmp_path: Path, arch: Arch) -> None:
    folder, found = make_tiny_model(tmp_path / "m", arch), []
    for form in ("grouped_mm", "eager"):
        with backend(settings(folder, train_backend="fsdp", clip_grad=0.0)) as made:
            model = made.actor.network.model
            assert model.config._experts_implementation == "grouped_mm"
            model.set_experts_implementation(form)
            log_probs, _ = made.log_probs(make_batch()), made.train(make_batch(), 0)
            found.append((log_probs, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    (got, ours), (want, theirs) = found
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    assert ours.keys() == theirs.keys()
    assert any("experts" in name for name in ours)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-6, atol=1e-6, msg=f"{name}: {{}}".format)


def test_the_reference_in_half_precision_chooses_the_experts_that_the_model_chooses(tmp_path: Path) -> None:
    """In bfloat16 the biases of a router would all be 8."""
    folder = make_tiny_model(tmp_path, "minimax_m2")
    weights = load_file(folder / "model.safetensors")
    for name in (name for name in weights if name.endswith("e_score_correction_bias")):
        weights[name] = 8 + 0.01 * torch.arange(len(weights[name]))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    batch = make_batch()
    with backend(settings(folder, train_backend="fsdp", bf16=True), AlgorithmSettings(use_kl_loss=True)) as made:
        np.testing.assert_array_equal(made.log_probs(batch, "ref"), made.log_probs(batch))


@pytest.mark.parametrize("arch", nightly(["qwen3_next", "lfm2", "qwen3_5_text"], 1))
@pytest.mark.parametrize("share", nightly([False, True], [True]))
def test_a_packed_sample_leaves_no_state_to_the_others(tmp_path: Path, arch: NoTable, share: bool) -> None:
    """Other tokens of one sample change no bit of the others' log-probs. The model is dense, because in a mixture the
    number of rows of a product depends on how many tokens chose the expert."""
    dense: dict[str, Any] = {"mlp_only_layers": [0, 1]} if arch == "qwen3_next" else {}
    folder, batch = make_tiny_model(tmp_path, arch, **dense), make_batch()
    train = settings(folder, train_backend="fsdp", share_prefixes=share, max_tokens_per_gpu=1000)
    with backend(train) as made:
        before = made.log_probs(batch)
        for changed in range(len(batch)):
            tokens, (start, end) = batch.tokens.copy(), batch.offsets[changed : changed + 2]
            tokens[end - 2 if share else start : end] = 5  # shared prefixes stay
            after = made.log_probs(replace(batch, tokens=tokens))
            own = np.zeros(len(before), bool)
            own[batch.response_slice(changed)] = True
            assert (after != before)[own].any()
            np.testing.assert_array_equal(after[~own], before[~own])


def test_what_cannot_be_packed_or_read_is_refused_by_name(tmp_path: Path) -> None:
    import transformers

    for config, reason in (
        (transformers.BloomConfig(n_layer=1), "no attention that can be replaced .BloomForCausalLM"),
        (transformers.MiniMaxConfig(num_hidden_layers=2), "layers of linear_attention"),
        (transformers.Llama4TextConfig(num_hidden_layers=4), "layers of chunked_attention"),
        (transformers.Llama4Config(), "more than text .Llama4Config"),
        (transformers.GlmMoeDsaConfig(num_hidden_layers=2), "layers of indexed_attention"),
        (transformers.Gemma3Config(), "more than text .Gemma3Config"),
        (transformers.Mamba2Config(), "no causal language model of it: .*time_step_limit"),
        (transformers.ViTConfig(), "no causal language model"),
    ):
        config.save_pretrained(tmp_path)
        with pytest.raises(TrainError, match=reason), backend(settings(tmp_path, train_backend="fsdp")):
            pass


def test_engine_and_trainer_cannot_agree_to_the_bit_about_states(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "lfm2")
    for same in (False, True):
        train = settings(folder, train_backend="fsdp", true_on_policy_mode=same)
        with pytest.raises(TrainError, match="lfm2 has layers with a state") if same else nullcontext():
            FsdpNetwork.check_model(HFFolder(folder), train, values=False)


def test_the_size_of_a_critic_of_an_untied_model_leaves_its_embedding_out(tmp_path: Path) -> None:
    from transformers import AutoModel

    body = AutoModel.from_pretrained(make_tiny_model(tmp_path, tie_word_embeddings=False))
    critic, embedding = Values(body, None), body.get_input_embeddings().weight
    matrices = sum(each.numel() for each in critic.parameters() if each.dim() > 1)
    assert shape_of(critic).matrices == matrices - embedding.numel()


def test_a_reward_model_with_several_scores_is_no_critic(tmp_path: Path) -> None:
    from transformers import AutoModel

    folder = make_tiny_model(tmp_path)
    body = AutoModel.from_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    scores = torch.zeros(2, body.config.hidden_size)
    save_file({**tensors, "score.weight": scores}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"score.weight: expected one score, a tensor \(1, \d+\), got \(2, "):
        Values(body, HFFolder(folder))


def test_an_optimizer_that_only_megatron_has_is_refused(folder: Path) -> None:
    chosen = settings(folder, train_backend="fsdp", optimizer="muon")
    with pytest.raises(TrainError, match="muon: fsdp has AdamW"), backend(chosen):
        pass


def test_weights_that_are_not_the_configs_are_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "granite")
    config = json.loads((folder / "config.json").read_text())
    for changes, reason in (({"num_hidden_layers": 3}, "lack model.layers.2"), ({"vocab_size": 500}, "cannot be read")):
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=reason), backend(settings(folder, train_backend="fsdp")):
            pass


def test_what_only_the_other_backend_reads_is_refused_with_the_remedy() -> None:
    def said(flags: str) -> str:
        try:
            settings = settings_of(flags)
        except SettingsError as error:
            return str(error)
        return "; ".join(inapplicable(settings, "train"))

    assert settings_of("--backend local").train.train_backend == "fsdp"
    assert settings_of("").train.train_backend == "megatron"
    two = "--train-backend fsdp --actor-num-gpus-per-node 2"
    for flags in ("--optimizer muon", "--use-distributed-optimizer", "--tensor-model-parallel-size 2"):
        assert "--train-backend megatron reads it" in said(f"{two} {flags}")
    assert "without --train-backend fsdp" in said("--fsdp-cpu-offload")
    assert "recomputes each layer or none" in said(f"{two} --recompute-granularity selective")
    assert "3 does not divide the 2" in said(f"{two} --data-parallel-replicate-degree 3")


def test_a_checkpoint_that_was_written_without_a_gpu_resumes_on_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(folder, train_backend="fsdp")
    with backend(chosen) as made:
        made.save(tmp_path / "0", 0)
    on_cpu = FsdpNetwork.random
    on_gpu = {"cuda_0": torch.zeros(16, dtype=torch.uint8)}
    monkeypatch.setattr(FsdpNetwork, "random", lambda network: on_cpu(network) | on_gpu)
    with backend(chosen) as made:
        made.load(tmp_path / "0")
