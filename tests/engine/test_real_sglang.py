"""A real SGLang server on this machine's CPU, through the launcher and the pool (`make test-sglang`).

The interpreter that has SGLang is `.venv-sglang/bin/python`, made by `scripts/install_sglang_cpu.sh`, or the one
that `AGENTRL_SGLANG_PYTHON` names.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.engine.launcher import launch
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from tests.engine import protocol_checks as checks

PYTHON = Path(os.environ.get("AGENTRL_SGLANG_PYTHON", Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"))
TOLERANCE = 0.02

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no SGLang interpreter at {PYTHON}"),
]


@pytest.fixture
async def pool(tiny_model: Path, tmp_path: Path) -> AsyncIterator[EnginePool]:
    settings = EngineSettings(
        engine="sglang", engine_python=str(PYTHON), sglang_cpu=True, sglang_options={"dtype": "float32"}
    )
    async with (
        launch(settings, tiny_model, log_dir=tmp_path) as engines,
        EnginePool([engine.url for engine in engines], settings, vocab_size=512) as pool,
    ):
        yield pool


async def test_everything_an_engine_must_do(pool: EnginePool, tiny_model: Path, other_model: Path) -> None:
    # One test and one server: a start costs half a minute.
    await checks.check_generate(pool, tiny_model, TOLERANCE)
    await checks.check_scores(pool, tiny_model, TOLERANCE)
    await checks.check_abort(pool)
    await checks.check_cancel(pool)
    await checks.check_every_mode(pool, tiny_model, other_model, TOLERANCE)
    await checks.check_broadcast(pool, tiny_model, TOLERANCE)
