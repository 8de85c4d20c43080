"""A real SGLang server on this machine's CPU (`make test-sglang`).

The interpreter that has SGLang is `.venv-sglang/bin/python`, made by `scripts/install_sglang_cpu.sh`, or the one
that `AGENTRL_SGLANG_PYTHON` names.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import Chat
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from tests.support.tiny_models import VOCAB_SIZE

PYTHON = Path(os.environ.get("AGENTRL_SGLANG_PYTHON", Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"))
CONTEXT = 8192
MARKS = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no SGLang at {PYTHON}: run scripts/install_sglang_cpu.sh"),
]
"""The marks of a module whose tests need SGLang."""


def sglang_settings(**options: Any) -> EngineSettings:
    """Return settings of a server in float32, with more options of SGLang's."""
    return EngineSettings(
        engine="sglang", engine_python=str(PYTHON), sglang_cpu=True, sglang_options={"dtype": "float32", **options}
    )


@dataclass(frozen=True)
class Server:
    """A real SGLang and the model that it serves."""

    url: str
    model: Path
    chat: Chat

    def pool(self) -> EnginePool:
        """Yield a pool of this engine."""
        return EnginePool([self.url], sglang_settings(), vocab_size=VOCAB_SIZE)
