"""The built-in server, started by the launcher and driven through the pool: the same checks as real SGLang passes."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.engine.launcher import launch
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from tests.engine import protocol_checks as checks

TOLERANCE = 1e-3


@pytest.fixture
async def pool(tiny_model: Path, tmp_path: Path) -> AsyncIterator[EnginePool]:
    settings = EngineSettings(embedded_threads=1, embedded_slots=4, engine_start_timeout=100.0)
    async with (
        launch(settings, tiny_model, log_dir=tmp_path) as engines,
        EnginePool([engine.url for engine in engines], settings, vocab_size=512) as pool,
    ):
        yield pool


@pytest.mark.slow
async def test_everything_an_engine_must_do(pool: EnginePool, tiny_model: Path, other_model: Path) -> None:
    # One test and one server: each start costs seconds.
    await checks.check_generate(pool, tiny_model, TOLERANCE)
    await checks.check_scores(pool, tiny_model, TOLERANCE)
    await checks.check_abort(pool)
    await checks.check_cancel(pool)
    await checks.check_every_mode(pool, tiny_model, other_model, TOLERANCE)
    await checks.check_broadcast(pool, tiny_model, TOLERANCE)
    await checks.check_broadcast(pool, other_model, TOLERANCE, "shared_memory")
