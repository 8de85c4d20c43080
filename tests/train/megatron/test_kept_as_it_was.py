"""State that does not learn, or not for long: frozen parameters, a reference that is updated, a reset optimizer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from agentrl.algorithms import AlgorithmSettings
from agentrl.errors import CheckpointError, TrainError
from agentrl.run.training import free_port
from agentrl.train.contracts import RankInfo
from agentrl.train.hf import HFFolder
from agentrl.train.settings import TrainSettings
from agentrl.train.trainer import TrainBackend
from tests.support.distributed import run_ranks
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import PPO, REPEATABLE, backend, make_batch, settings

KL = AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.1)
ROWS = "layers.1.mlp", "embed"
"""Patterns of Hugging Face names."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def exported(made: TrainBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.export_weights()}


def moved(train: TrainSettings) -> set[str]:
    """Return the tensors that a step changes."""
    with backend(train) as made:
        before = exported(made)
        made.train(make_batch(groups=1), 0)
        return {name for name, tensor in made.export_weights() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize(
    ("patterns", "part"),
    [
        ({"freeze_params_name_list": (r"decoder\.layers\.1\.", "embed")}, "layers.1|embed"),
        ({"freeze_params_name_list": ("q_proj",)}, "[qkv]_proj"),
        ({"only_train_params_name_list": (r"layers\.0\.", "final_layernorm")}, "layers.1|embed"),
        ({"freeze_params_name_list": ("norm",), "optimizer": "muon"}, "norm"),
        ({"only_train_params_name_list": (r"mlp\.\w+_proj",), "optimizer": "muon"}, r"^(?!.*mlp\.\w+_proj)"),
        ({"freeze_params_name_list": ("norm",), "use_distributed_optimizer": True, "bf16": True}, "norm"),
    ],
    ids=str,
)
def test_frozen_parameters_stay_to_the_bit_and_the_others_learn(
    folder: Path, patterns: dict[str, Any], part: str
) -> None:
    changed, everything = moved(settings(folder, **patterns)), set(HFFolder(folder).files)
    frozen = {name for name in everything if re.search(part, name)}
    assert changed == everything - frozen
    assert frozen


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_the_rest_are_as_without_freezing(tmp_path: Path, tied: bool) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", tie_word_embeddings=tied)
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    found = []
    for more in ({}, {"freeze_params_name_list": ("embedding",)}, {"freeze_params_name_list": ("embedding",), **whole}):
        with backend(settings(folder, clip_grad=0.0, **more)) as made:
            made.train(make_batch(), 0)
            parameters = {n: p.main_grad for n, p in made.actor.network.parameters().items() if p.requires_grad}
            found.append({name: gradient.clone() for name, gradient in parameters.items()})
    assert len(found[0]) == len(found[1]) + 1
    for frozen in found[1:]:
        for name, gradient in frozen.items():
            torch.testing.assert_close(gradient, found[0][name], rtol=1e-5, atol=1e-7, msg=name)


def test_patterns_that_say_nothing_or_leave_nothing_are_refused(folder: Path) -> None:
    for patterns, message in (
        (
            {"freeze_params_name_list": ("embedding", "experts")},
            "--freeze-params-name-list experts: no parameter is called",
        ),
        ({"freeze_params_name_list": (".",)}, "nothing of the model is left to learn"),
    ):
        with pytest.raises(TrainError, match=message), backend(settings(folder, **patterns)):
            pass
    with pytest.raises(ValueError, match="no regular expression"):
        settings(folder, freeze_params_name_list=("(",))
    with pytest.raises(ValueError, match="both say what learns"):
        settings(folder, freeze_params_name_list=("a",), only_train_params_name_list=("b",))


def test_the_critic_learns_with_all_it_has(folder: Path) -> None:
    with backend(settings(folder, only_train_params_name_list=("embed",)), PPO) as made:
        assert made.critic is not None
        assert all(parameter.requires_grad for parameter in made.critic.network.parameters().values())
        assert not all(parameter.requires_grad for parameter in made.actor.network.parameters().values())


def test_a_resume_needs_the_same_patterns(folder: Path, tmp_path: Path) -> None:
    train = settings(folder, freeze_params_name_list=ROWS, **REPEATABLE)
    with backend(train) as made:
        made.train(make_batch(), 0)
        made.save(tmp_path / "one", 0)
        made.offload()
        made.onload()
        made.train(make_batch(), 1)
        want = exported(made)
    with backend(train) as made:
        made.load(tmp_path / "one")
        made.train(make_batch(), 1)
        assert all(torch.equal(tensor, want[name]) for name, tensor in made.export_weights())
    with backend(settings(folder)) as made, pytest.raises(CheckpointError, match="freeze_params_name_list"):
        made.load(tmp_path / "one")


def test_the_reference_follows_at_its_interval_and_over_a_resume(folder: Path, tmp_path: Path) -> None:
    batch, train = make_batch(), settings(folder, ref_update_interval=2, num_steps_per_rollout=2)
    with backend(train, KL) as made:
        first = made.log_probs(batch, "ref")
        made.train(batch, 0)
        made.save(tmp_path / "one", 0)
        np.testing.assert_array_equal(made.log_probs(batch, "ref"), first)
        made.train(batch, 1)
        followed = made.log_probs(batch)
        np.testing.assert_array_equal(made.log_probs(batch, "ref"), followed)
        made.train(batch, 2)
        np.testing.assert_array_equal(made.log_probs(batch, "ref"), followed)
        made.save(tmp_path / "three", 2)
    with backend(train, KL) as made:
        made.load(tmp_path / "three")
        np.testing.assert_array_equal(made.log_probs(batch, "ref"), followed)
        made.save(tmp_path / "again", 2)
    with backend(train, KL) as made:
        made.load(tmp_path / "again")
        np.testing.assert_array_equal(made.log_probs(batch, "ref"), followed)
        made.load(tmp_path / "one")
    with backend(settings(folder)) as made:  # no loss uses one
        made.load(tmp_path / "three")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"optimizer": "muon"}, marks=pytest.mark.slow),
        pytest.param({"bf16": True, "use_distributed_optimizer": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_optimizer_that_forgets_steps_as_if_it_were_new(
    folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    batches, changes = [make_batch(seed=seed) for seed in range(2)], {**REPEATABLE, **changes}
    with backend(settings(folder, reset_optimizer_states=True, no_save_optim=True, **changes)) as made:
        made.train(batches[0], 0)
        made.save(tmp_path / "one", 0)
        made.save_hf(tmp_path / "model")
        made.train(batches[1], 1)
        got = exported(made)
    if "bf16" not in changes:  # else the file holds rounded weights
        with backend(settings(tmp_path / "model", **changes)) as made:
            made.train(batches[1], 1)
            assert all(torch.equal(tensor, got[name]) for name, tensor in made.export_weights())
    with backend(settings(folder, **changes)) as made:  # a new optimizer, as no state was saved
        made.load(tmp_path / "one")
        assert not made.actor.optimizer.stepped
        made.train(batches[0], 0)
        made.train(batches[1], 1)
        assert not all(torch.equal(tensor, got[name]) for name, tensor in made.export_weights())


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon"}, {"bf16": True}], ids=str)
def test_a_checkpoint_of_a_reset_optimizer_resumes(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    train, batch = settings(folder, reset_optimizer_states=True, **{**REPEATABLE, **changes}), make_batch()
    with backend(train) as made:
        made.train(batch, 0)
        made.save(tmp_path / "one", 0)
        made.train(batch, 1)
        got = exported(made)
    with backend(train) as made:
        made.load(tmp_path / "one")
        made.train(batch, 1)
        assert all(torch.equal(tensor, got[name]) for name, tensor in made.export_weights())


def of_layout(rank: int, port: int, folder: Path, changes: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    where = RankInfo(rank, 2, rank, master_port=port)
    with backend(settings(folder, freeze_params_name_list=ROWS, ref_update_interval=1, **changes), KL, where) as made:
        for number in range(2):
            made.train(make_batch(), number)
        return {name: tensor.numpy() for name, tensor in exported(made).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}, {"use_distributed_optimizer": True}],
    ids=str,
)
def test_frozen_and_followed_alike_under_every_layout(folder: Path, changes: dict[str, Any]) -> None:
    with backend(settings(folder, freeze_params_name_list=ROWS, ref_update_interval=1), KL) as made:
        start = exported(made)
        for number in range(2):
            made.train(make_batch(), number)
        want = exported(made)
    got = run_ranks(of_layout, 2, free_port(), folder, changes)[0]
    for name, tensor in want.items():
        np.testing.assert_allclose(got[name], tensor.numpy(), rtol=0, atol=2e-6, err_msg=name)
        assert np.array_equal(got[name], start[name].numpy()) == any(part in name for part in ROWS), name
