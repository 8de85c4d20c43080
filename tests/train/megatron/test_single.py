"""One process: log-probs, gradients and steps against plain torch; Muon; failures; reference model; several steps."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algorithms import AlgorithmSettings, TokenLoss, TokenView
from agentrl.errors import AgentRLError, TrainError
from agentrl.train.learning_rate import learning_rate
from agentrl.train.trainer import TrainBackend
from tests.support.nightly import nightly
from tests.support.tiny_models import Arch, make_tiny_model
from tests.train.megatron.helpers import Reference, backend, by_hub_name, gradients, make_batch, settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_a_closed_model_is_freed(tmp_path: Path, arch: Arch) -> None:
    with backend(settings(make_tiny_model(tmp_path, arch))) as made:
        made.train(make_batch(), 0)
        model = weakref.ref(made.actor.network.model)
    gc.collect()
    assert model() is None


def exported(made: TrainBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in made.export_weights()}


@pytest.mark.parametrize(
    ("arch", "tied", "changes"),
    nightly(
        [
            ("qwen2", False, {"clip_grad": 0.0}),
            ("glm4_moe", False, {"clip_grad": 0.0}),
            ("qwen3_moe", True, {"clip_grad": 0.05, "use_distributed_optimizer": True}),
            ("qwen3", True, {"clip_grad": 0.05, "weight_decay": 1.0, "deterministic_mode": True}),
            ("qwen3", True, {"clip_grad": 0.0}),
            ("llama", False, {"clip_grad": 0.0}),
            ("qwen2_moe", False, {"clip_grad": 0.0}),
            ("qwen3", True, {"clip_grad": 0.05, "weight_decay": 1.0, "use_distributed_optimizer": True}),
        ],
        2,
    ),
)
def test_log_probs_gradients_and_steps_match_plain_torch(
    tmp_path: Path, arch: Arch, tied: bool, changes: dict[str, Any]
) -> None:
    folder = make_tiny_model(tmp_path / arch, arch, tie_word_embeddings=tied)
    batch, algorithm = make_batch(), AlgorithmSettings()
    train = settings(folder, **changes)
    reference = Reference(folder, train, algorithm)
    with backend(train, algorithm) as made:
        assert torch.are_deterministic_algorithms_enabled() == train.deterministic_mode
        got = made.log_probs(batch)
        np.testing.assert_allclose(got, reference.log_probs(batch).detach().numpy(), rtol=0, atol=1e-5)
        for number in range(2):
            want, metrics = reference.step(batch), made.train(batch, number)
            theirs = by_hub_name({name: p.grad for name, p in reference.model.named_parameters() if p.grad is not None})
            assert metrics["grad_norm"] > train.clip_grad
            assert metrics["loss"] == pytest.approx(want["loss"], rel=1e-5, abs=1e-6)
            assert metrics["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
            for name, gradient in gradients(made) if not train.use_distributed_optimizer else ():
                torch.testing.assert_close(
                    gradient, theirs[name], rtol=1e-4, atol=2e-6, msg=functools.partial("{}: {}".format, name)
                )
        theirs = by_hub_name(reference.model.state_dict())
        for name, weights in exported(made).items():
            torch.testing.assert_close(weights, theirs[name], rtol=0, atol=1e-5, msg=name)


def test_shared_prefixes_change_what_is_computed_and_no_number(folder: Path) -> None:
    batch, algorithm = make_batch(groups=6), AlgorithmSettings(entropy_coef=0.01)
    found = {}
    for share in (True, False):
        with backend(settings(folder, share_prefixes=share, max_tokens_per_gpu=200), algorithm) as made:
            log_probs = made.log_probs(batch)
            metrics = [dict(made.train(batch, number)) for number in range(2)]
            found[share] = log_probs, metrics, exported(made)
    np.testing.assert_allclose(found[True][0], found[False][0], rtol=0, atol=5e-6)
    for ours, theirs in zip(found[True][1], found[False][1], strict=True):
        assert (theirs["computed_tokens_share"], theirs["copied_tokens_share"]) == (1.0, 0.0)
        assert ours["computed_tokens_share"] < 0.8
        assert 0 <= ours["copied_tokens_share"] < 0.1
        for key in ("loss", "grad_norm", "entropy", "tokens"):
            assert ours[key] == pytest.approx(theirs[key], rel=2e-6), key
    for name, weights in found[True][2].items():
        torch.testing.assert_close(weights, found[False][2][name], rtol=0, atol=2e-6, msg=name)


def test_half_precision_is_the_default_of_gpus_only(folder: Path) -> None:
    there = torch.cuda.is_available()
    with backend(settings(folder, bf16=None)) as made:
        assert made.settings.bf16 is there
        dtype = torch.bfloat16 if there else torch.float32
        assert {tensor.dtype for _, tensor in made.export_weights()} == {dtype}


@pytest.mark.parametrize("steps", nightly([1, 2], 1))
def test_the_learning_rate_is_counted_in_optimizer_steps(folder: Path, steps: int) -> None:
    train = settings(folder, num_steps_per_rollout=steps, lr_decay_style="linear", lr_warmup_iters=3)
    with backend(train, total_steps=12) as made:
        for step in range(0, 12, steps):
            want = [learning_rate(number, train, 12) for number in range(step, step + steps)]
            assert made.train(make_batch(groups=1), step // steps)["lr"] == pytest.approx(np.mean(want), rel=1e-12)


def test_metrics_say_how_far_trainer_and_engine_are_apart(folder: Path) -> None:
    batch = make_batch()
    assert batch.rollout_log_probs is not None
    with backend(settings(folder)) as made:
        trained = batch.loss_mask == 1
        gap = np.abs(made.log_probs(batch) - batch.rollout_log_probs)[trained].mean()
        metrics = made.train(batch, 0)
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(gap, rel=1e-4)
    assert metrics["tokens"] == trained.sum()
    assert metrics["entropy"] > 0
    assert metrics["ppo_kl"] == 0
    assert metrics["pg_clipfrac"] == 0


@pytest.mark.parametrize("steps", nightly([1, 2], 1))
def test_what_was_said_of_each_token_is_kept_in_the_batchs_layout(folder: Path, steps: int) -> None:
    batch = make_batch()
    with backend(settings(folder, num_steps_per_rollout=steps), AlgorithmSettings(use_kl_loss=True)) as made:
        before, prepared = made.log_probs(batch), made.prepare(batch)
        made.train(batch, 0, prepared)
        said, trained = made.details(), batch.loss_mask == 1
        assert {name: (array.dtype.name, len(array)) for name, array in said.items()} == dict.fromkeys(
            ["log_probs", "advantages", "ref_log_probs"], ("float16", len(batch.loss_mask))
        )
        assert all(np.isnan(array[~trained]).all() for array in said.values())
        np.testing.assert_allclose(said["advantages"][trained], prepared.arrays["advantages"][trained], atol=2e-3)
        first = np.isin(np.arange(len(trained)), batch.response_positions(next(batch.split(steps)))) & trained
        np.testing.assert_allclose(said["log_probs"][first], before[first], atol=1e-2)
        if steps == 2:
            later = trained & ~first
            assert np.abs(said["log_probs"][later] - before[later]).max() > 0.02, "after the first step"


def test_several_steps_a_rollout_use_old_log_probs(folder: Path) -> None:
    train = settings(folder, num_steps_per_rollout=3)
    with backend(train) as made:
        metrics = made.train(make_batch(), 0)
    assert metrics["steps"] == 3
    assert abs(metrics["ppo_kl"]) > 1e-6


def test_the_second_of_two_steps_is_taken_against_the_policy_before_the_first(folder: Path) -> None:
    batch, algorithm = make_batch(groups=2), AlgorithmSettings(eps_clip=0.02)
    train = settings(folder, num_steps_per_rollout=2, clip_grad=0.0, lr=1e-2)
    with backend(train, algorithm) as made:
        metrics = made.train(batch, 0)
    first, second = (batch.select(part) for part in batch.split(2))
    assert set(first.group_ids) == {0}
    reference = Reference(folder, train, algorithm)
    old = reference.log_probs(second).detach()
    want = [reference.step(first), reference.step(second, old)]
    for key in ("loss", "grad_norm", "ppo_kl", "pg_clipfrac"):
        assert metrics[key] == pytest.approx(np.mean([step[key] for step in want]), rel=1e-4, abs=1e-6), key
    assert abs(want[1]["ppo_kl"]) > 1e-3
    assert want[1]["pg_clipfrac"] > 0.1


@pytest.mark.slow
def test_packing_does_not_change_the_step(folder: Path) -> None:
    batch, results = make_batch(), []
    for changes in ({"max_tokens_per_gpu": 1000}, {"use_dynamic_batch_size": False, "max_tokens_per_gpu": None}):
        with backend(settings(folder, **changes)) as made:
            metrics = made.train(batch, 0)
            results.append((metrics["loss"], metrics["grad_norm"]))
    assert results[0] == pytest.approx(results[1], rel=1e-5, abs=1e-6)


def test_reference_model_is_the_start_and_stays(folder: Path) -> None:
    batch = make_batch()
    with backend(settings(folder), AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.1)) as made:
        before = made.log_probs(batch, "ref")
        assert made.train(batch, 0)["kl_loss"] == pytest.approx(0.0, abs=1e-6)
        weights = exported(made)
        np.testing.assert_array_equal(made.log_probs(batch, "ref"), before)
        assert np.abs(made.log_probs(batch) - before).max() > 1e-3
        assert all(torch.equal(tensor, weights[name]) for name, tensor in exported(made).items())


@pytest.mark.slow
def test_another_reference_model_is_itself(folder: Path, tmp_path: Path) -> None:
    batch, other = make_batch(), make_tiny_model(tmp_path / "other", "qwen3", seed=7)
    algorithm = AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.1)
    with backend(settings(other)) as made:
        want = made.log_probs(batch)
    with backend(settings(folder, ref_load=str(other)), algorithm) as made:
        start = exported(made)
        np.testing.assert_array_equal(made.log_probs(batch, "ref"), want)
        assert all(torch.equal(tensor, start[name]) for name, tensor in exported(made).items())
        assert abs(made.train(batch, 0)["kl_loss"]) > 0.01
        np.testing.assert_array_equal(made.log_probs(batch, "ref"), want)
    wide = make_tiny_model(tmp_path / "wide", "qwen3", layers=3)
    with (
        pytest.raises(TrainError, match="ref_load .*wide has other sizes"),
        backend(settings(folder, ref_load=str(wide)), algorithm),
    ):
        pass


def test_supervised_training_lowers_the_negative_log_likelihood(folder: Path) -> None:
    batch = dataclasses.replace(make_batch(), rollout_log_probs=None)
    with backend(settings(folder), AlgorithmSettings(loss_type="sft_loss", calculate_per_token_loss=True)) as made:
        want = -made.log_probs(batch)[batch.loss_mask == 1].mean()
        losses = [made.train(batch, number)["loss"] for number in range(5)]
    assert losses[0] == pytest.approx(want, rel=1e-5)
    assert losses[-1] < losses[0]


def test_weights_are_exported_in_the_order_of_their_specs(folder: Path) -> None:
    with backend(settings(folder)) as made:
        assert [spec.name for spec in made.weight_specs()[0]] == list(exported(made))


def test_no_reference_model_without_a_kl_term(folder: Path) -> None:
    with backend(settings(folder)) as made, pytest.raises(TrainError, match="reference"):
        made.log_probs(make_batch(), "ref")


def test_engine_log_probs_as_old_log_probs(folder: Path) -> None:
    batch = make_batch()
    with backend(settings(folder), AlgorithmSettings(use_rollout_logprobs=True)) as made:
        assert made.train(batch, 0)["pg_clipfrac"] > 0.1


def test_non_finite_loss_leaves_the_weights_alone(folder: Path) -> None:
    batch = make_batch()
    bad = dataclasses.replace(batch, rollout_log_probs=np.full(len(batch.loss_mask), np.nan, np.float32))
    with backend(settings(folder), AlgorithmSettings(use_rollout_logprobs=True)) as made:
        before = exported(made)
        with pytest.raises(TrainError, match="not|nan"):
            made.train(bad, 0)
        assert all(torch.equal(tensor, before[name]) for name, tensor in exported(made).items())
        made.train(batch, 0)


def not_a_number(view: TokenView, settings: AlgorithmSettings) -> TokenLoss:
    return TokenLoss(-view.log_probs * torch.nan, {})


def without_gradient(view: TokenView, settings: AlgorithmSettings) -> TokenLoss:
    return TokenLoss(-view.log_probs.detach(), {})


def steep(view: TokenView, settings: AlgorithmSettings) -> TokenLoss:
    """Return a finite value whose gradient is not finite."""
    return TokenLoss((0 * view.log_probs).sqrt() - view.log_probs, {})


@pytest.mark.parametrize("name", ["not_a_number", "without_gradient", "steep"])
def test_a_loss_of_ones_own_that_cannot_be_trained_on_is_named_and_leaves_the_weights_alone(
    folder: Path, name: str
) -> None:
    path = f"{__file__}:{name}"
    algorithm = AlgorithmSettings(loss_type="custom_loss", custom_loss_function_path=path)
    with backend(settings(folder), algorithm) as made:
        before = exported(made)
        with pytest.raises(AgentRLError, match=f"--custom-loss-function-path {path}"):
            made.train(make_batch(), 0)
        assert all(torch.equal(tensor, before[name]) for name, tensor in exported(made).items())


def test_statistics_are_means_whatever_the_weights_scale(folder: Path) -> None:
    """With a constant denominator the loss and its gradient shrink, but the share of clipped tokens does not."""
    found = {}
    for name, changes in {"live": {}, "constant": {"loss_denominator": "constant", "loss_max_length": 1000}}.items():
        algorithm = AlgorithmSettings(calculate_per_token_loss=name == "live", **changes)
        with backend(settings(folder), algorithm) as made:
            found[name] = made.train(make_batch(), 0)
    tokens, trajectories = found["live"]["tokens"], len(make_batch())
    assert found["constant"]["loss"] == pytest.approx(found["live"]["loss"] * tokens / (trajectories * 1000), rel=1e-5)
    assert found["constant"]["entropy"] == pytest.approx(found["live"]["entropy"], rel=1e-5)
    assert found["live"]["advantages/max"] > 0


def test_ids_outside_the_vocabulary_are_named(folder: Path) -> None:
    batch = make_batch()
    tokens = batch.tokens.copy()
    tokens[-1] = 512
    with (
        backend(settings(folder)) as made,
        pytest.raises(TrainError, match="token id 512, but the vocabulary .* has 512"),
    ):
        made.train(dataclasses.replace(batch, tokens=tokens), 0)


def test_a_batch_without_a_trained_token_gives_no_gradient(folder: Path) -> None:
    batch = make_batch()
    with backend(settings(folder)) as made:
        before = exported(made)
        metrics = made.train(dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask)), 0)
        assert metrics["loss"] == metrics["grad_norm"] == metrics["tokens"] == 0
        assert all(torch.equal(tensor, before[name]) for name, tensor in exported(made).items())


def test_a_step_without_a_trained_token_is_not_in_the_means_of_statistics(folder: Path) -> None:
    batch, mask = make_batch(), make_batch().loss_mask.copy()
    mask[batch.response_slice(6).start :] = 0
    masked = dataclasses.replace(batch, loss_mask=mask)
    found = []
    for part, steps in ((masked.select(range(6)), 1), (masked, 2)):
        with backend(settings(folder, num_steps_per_rollout=steps)) as made:
            found.append(made.train(part, 0))
    for name in ("ratio", "entropy"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-5)
    assert found[1]["steps"] == 2


def test_muon_trains_matrices_and_adam_the_rest(folder: Path) -> None:
    batch = make_batch()
    with backend(settings(folder, optimizer="muon", muon_lr=1e-2)) as made:
        before = exported(made)
        metrics = [made.train(batch, number) for number in range(3)]
        moved = {name: (tensor - before[name]).abs().max().item() for name, tensor in exported(made).items()}
    assert all(np.isfinite(m["grad_norm"]) for m in metrics)
    assert min(moved.values()) > 0
    assert moved["model.embed_tokens.weight"] <= 4e-3 < moved["model.layers.0.mlp.down_proj.weight"]


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_muon_in_float32_takes_pytorchs_steps_within_bfloat16s_rounding(shape: tuple[int, int]) -> None:
    from agentrl.train.megatron.optimizer import Muon

    weights = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(2)]
    ours = Muon([{"params": weights[:1], "lr": 0.1, "weight_decay": 0.5}])
    theirs = torch.optim.Muon(weights[1:], lr=0.1, weight_decay=0.5, adjust_lr_fn="match_rms_adamw")
    for seed in range(3):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for weight, optimizer in zip(weights, (ours, theirs), strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
        gap = (weights[0] - weights[1]).norm() / weights[1].norm()
        assert gap < 0.02


def test_impossible_layouts_are_refused(folder: Path) -> None:
    wide = settings(folder, tensor_model_parallel_size=2)
    with pytest.raises(TrainError, match="1 trainer processes"), backend(wide):
        pass


@pytest.mark.parametrize("changes", nightly([{"bf16": True}, {"bf16": True, "use_distributed_optimizer": True}], 1))
def test_bf16_stays_close_to_fp32(folder: Path, changes: dict[str, Any]) -> None:
    batch = make_batch()
    with backend(settings(folder)) as made:
        want = [made.train(batch, number)["grad_norm"] for number in range(2)]
        exact = made.log_probs(batch)
    with backend(settings(folder, **changes)) as made:
        got = [made.train(batch, number)["grad_norm"] for number in range(2)]
        assert {tensor.dtype for _, tensor in made.export_weights()} == {torch.bfloat16}
        assert np.abs(made.log_probs(batch) - exact).mean() < 0.05
    assert got == pytest.approx(want, rel=0.1)


@pytest.mark.slow
def test_full_recomputation_changes_nothing(folder: Path) -> None:
    batch = make_batch()
    changes = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    results = []
    for more in ({}, changes):
        with backend(settings(folder, **more)) as made:
            metrics = made.train(batch, 0)
            results.append((metrics["loss"], metrics["grad_norm"]))
    assert results[0] == pytest.approx(results[1], rel=1e-6)
