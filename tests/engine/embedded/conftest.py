from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.sglang.recorded_model import make_recorded_model
from tests.support.embedded_server import embedded_server

ARCHES = ("qwen3", "qwen2", "llama", "qwen3_moe")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes the folder of a tiny random model at its first call."""
    base = tmp_path_factory.mktemp("tiny")

    def get(arch: str = "qwen3", seed: int = 0) -> Path:
        path = base / f"{arch}-{seed}"
        if not path.exists():
            make_recorded_model(path, seed, arch=arch, dtype="float32")
        return path

    return get


@pytest.fixture(scope="session")
def plain_model(folder: Callable[..., Path]) -> Callable[..., Any]:
    """Return a function that loads the same model with transformers, in float32."""
    from transformers import AutoModelForCausalLM

    def get(arch: str = "qwen3", seed: int = 0) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder(arch, seed), dtype="float32").eval()

    return get


@pytest.fixture(scope="session")
def server(folder: Callable[..., Path]) -> Iterator[str]:
    with embedded_server(folder(), "--dtype", "float32", "--slots", "8") as url:
        yield url
