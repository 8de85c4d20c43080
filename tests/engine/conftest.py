"""A tiny model for the engine's tests, made once, and an engine in this process that serves it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.engine.local import in_process
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import HttpTransport
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a Qwen3 folder with random float32 weights."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "qwen3", seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the same architecture with other weights."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "other", "qwen3", seed=1)


class OwnTransport(HttpTransport):
    """Connections to the engine of this process at `url`."""

    url = ""


@pytest.fixture
async def transport(tiny_model: Path) -> AsyncIterator[OwnTransport]:
    settings = EngineSettings(embedded_slots=4, engine_max_retries=0)
    async with in_process(settings, tiny_model) as url, OwnTransport(settings) as transport:
        transport.url = url
        yield transport
