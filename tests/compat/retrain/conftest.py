from pathlib import Path

import pytest

from agentrl.chat import Chat
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def chat(tiny: Path) -> Chat:
    return Chat.load(str(tiny))
