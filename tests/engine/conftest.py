"""A tiny model for the engine's tests, made once."""

from pathlib import Path

import pytest

from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 folder with random float32 weights."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "qwen3", seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "other", "qwen3", seed=1)
