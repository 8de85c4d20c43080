"""The tiny model of the engine's tests, and a real SGLang server for the modules that need it."""

from collections.abc import Iterator

import pytest

from agentrl.chat import Chat
from agentrl.engine.launcher import launch_blocking
from tests.engine.conftest import tiny_model
from tests.support.real_sglang import CONTEXT, Server, sglang_settings
from tests.support.tiny_models import make_tiny_model

__all__ = ["tiny_model"]


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real SGLang server with a tiny model."""
    folder = tmp_path_factory.mktemp("sglang")
    model = make_tiny_model(folder / "model", "qwen3", seed=0, context_length=CONTEXT)
    with launch_blocking(sglang_settings(), model, log_dir=folder) as engines:
        yield Server(engines[0].url, model, Chat.load(str(model)))
