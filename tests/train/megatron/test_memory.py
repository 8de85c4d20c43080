"""The trainer's memory while engines generate: it leaves the process, and training continues unaffected."""

import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from agentrl.algorithms import AlgorithmSettings
from agentrl.errors import TrainError
from tests.support.nightly import nightly
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import PPO, backend, make_batch, settings, timeless

STATE = 4
"""Memory in copies of the weights: the weights, their gradients, and two moments of Adam."""


@pytest.mark.parametrize(
    ("changes", "algorithm"),
    nightly(
        [
            ({"use_distributed_optimizer": True, "bf16": True}, AlgorithmSettings(use_kl_loss=True)),
            ({"optimizer": "muon"}, AlgorithmSettings()),
            ({}, PPO),
        ],
        1,
    ),
)
def test_training_goes_on_bit_for_bit(tmp_path: Path, changes: dict[str, Any], algorithm: AlgorithmSettings) -> None:
    train, batch = settings(make_tiny_model(tmp_path / "model"), **changes), make_batch()
    found = []
    for asleep in (False, True):
        with backend(train, algorithm) as made:
            log = []
            for number in range(3):
                if asleep:
                    before = {name: tensor.clone() for name, tensor in made.export_weights()}
                    made.offload()
                    made.offload()
                    made.onload()
                    made.onload()
                    assert all(torch.equal(before[name], tensor) for name, tensor in made.export_weights())
                log.append(timeless(made.train(batch, number)))
            found.append((log, {name: tensor.clone() for name, tensor in made.export_weights()}))
    (log, weights), (again, later) = found
    if torch.cuda.is_available():
        return  # sums of its kernels are not reproducible
    assert again == log
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, later[name])] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU they are not in the process's own memory")
def test_models_gradients_and_optimizer_leave_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden_size=1024)
    with backend(settings(folder)) as made:
        made.train(make_batch(groups=1), 0)
        weights = sum(parameter.nbytes for parameter in made.actor.network.parameters().values())
        full = psutil.Process().memory_info().rss
        made.offload()
        given_back = full - psutil.Process().memory_info().rss
        made.onload()
        assert given_back > 0.95 * STATE * weights > 250e6
        with monkeypatch.context() as patched:
            patched.setattr(tempfile, "TemporaryFile", lambda **_: Path("/dev/full").open("wb"))  # noqa: SIM115 - closed with what holds it
            with pytest.raises(TrainError, match="could not be offloaded .*No space left"):
                made.offload()
        made.train(make_batch(groups=1), 1)
