from pathlib import Path

import pytest

from agentrl.chat import Chat
from tests.support.runs import RunKit


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    """Make a tiny model, an environment and prompts."""
    return RunKit.make(Path(tmp_path_factory.mktemp("kit")), prompts=8)


@pytest.fixture(scope="session")
def chat(kit: RunKit) -> Chat:
    return Chat.load(str(kit.folder / "model"))
