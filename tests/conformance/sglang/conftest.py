from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.sglang.recorded_model import make_recorded_model
from tests.support.embedded_server import embedded_server


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make the folders of the recorded model and of a sibling from another seed."""
    folder = tmp_path_factory.mktemp("recorded")
    return make_recorded_model(folder / "qwen3"), make_recorded_model(folder / "qwen3_b", seed=1)


@pytest.fixture(scope="session")
def url(models: tuple[Path, Path]) -> Iterator[str]:
    with embedded_server(models[0], "--dtype", "bfloat16") as address:
        yield address
