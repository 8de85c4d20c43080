import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = "/dev/shm"


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Return a folder in memory if the machine has one: these tests kill processes, not machines, and need no disk."""
    if not os.access(_MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="agentrl-test-", dir=_MEMORY) as folder:
        yield Path(folder)
