"""The contract of train backends: the type checker verifies implementations, and they are found in one place."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import agentrl
from agentrl.algorithms import AlgorithmSettings
from agentrl.errors import CheckpointError, SettingsError, TrainError
from agentrl.train.backends import backend_class
from agentrl.train.megatron.network import MegatronBackend
from agentrl.train.settings import TrainSettings
from agentrl.train.trainer import TrainBackend


def test_every_name_that_the_settings_allow_is_a_whole_backend() -> None:
    names = TrainSettings.model_fields["train_backend"].annotation
    for name in set(names.__args__) - {"auto"}:  # type: ignore[union-attr]
        assert not inspect.isabstract(backend_class(name))
    assert backend_class("megatron") is MegatronBackend
    with pytest.raises(SettingsError, match="fsdp9"):
        backend_class("fsdp9")


def test_backends_are_made_alike() -> None:
    assert MegatronBackend.__init__ is TrainBackend.__init__
    with pytest.raises(TrainError, match="hf_checkpoint"):
        MegatronBackend(TrainSettings(), AlgorithmSettings())
    with pytest.raises(CheckpointError, match="nowhere"):
        MegatronBackend(TrainSettings(hf_checkpoint="nowhere"), AlgorithmSettings())


def test_megatron_is_imported_in_its_package_for_its_checkpoints_and_where_a_backend_is_chosen() -> None:
    root = Path(agentrl.__file__).parent
    imports = re.compile(r"^ *(from|import) agentrl\.train\.megatron", re.MULTILINE)
    found = {str(file.relative_to(root)) for file in root.rglob("*.py") if imports.search(file.read_text())}
    outside = {file for file in found if not file.startswith("train/megatron/")}
    choice = {"config/settings.py", "train/backends.py"}  # by the names of model families, then by that of a backend
    assert outside - {"cluster/trainers.py", "train/convert.py"} == {*choice, "train/fsdp/network.py"}
