"""A teacher beside the trained model, and a teacher whose log-probs came with the samples."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from agentrl.algorithms import AlgorithmSettings
from agentrl.errors import TrainError
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import backend, make_batch, settings

OPD = AlgorithmSettings(advantage_estimator="on_policy_distillation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", seed=0)


def test_a_teacher_of_another_size_is_itself_and_stays(folder: Path, tmp_path: Path) -> None:
    batch, large = make_batch(), make_tiny_model(tmp_path / "large", "llama", layers=3, seed=7)
    with backend(settings(large)) as made:
        teacher = made.log_probs(batch)
    with backend(settings(folder, opd_teacher_load=str(large)), OPD) as made:
        np.testing.assert_array_equal(made.log_probs(batch, "teacher"), teacher)
        trained = batch.loss_mask == 1
        distance = (made.log_probs(batch) - teacher)[trained].mean()
        loaded = made.train(batch, 0)
        assert loaded["opd_reverse_kl"] == pytest.approx(distance, abs=1e-5)
        assert loaded["advantages/mean"] == pytest.approx(-distance, abs=1e-5)
        np.testing.assert_array_equal(made.log_probs(batch, "teacher"), teacher)
    with backend(settings(folder), OPD) as made:
        asked = made.train(dataclasses.replace(batch, teacher_log_probs=teacher), 0)
    for name in ("loss", "grad_norm", "opd_reverse_kl"):
        assert asked[name] == pytest.approx(loaded[name], rel=1e-6), name


def test_without_a_teacher_nothing_is_trained(folder: Path) -> None:
    with backend(settings(folder), OPD) as made:
        with pytest.raises(TrainError, match="no teacher model: set use_opd and opd_teacher_load"):
            made.log_probs(make_batch(), "teacher")
        with pytest.raises(
            TrainError, match="reads teacher_log_probs, which neither a model of this run nor the samples"
        ):
            made.train(make_batch(), 0)


def test_a_teacher_that_lacks_a_sampled_token_is_refused(folder: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(480)
    model.save_pretrained(small)
    with (
        backend(settings(folder, opd_teacher_load=str(small)), OPD) as made,
        pytest.raises(TrainError, match="vocabulary of .*small has 480"),
    ):
        made.train(make_batch(), 0)
