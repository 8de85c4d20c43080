from pathlib import Path

import pytest

from agentrl.chat import Chat
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = Path(tmp_path_factory.mktemp("tiny"))
    make_tiny_model(folder)
    return Chat.load(str(folder))
