"""A real SGLang server through the launcher and the pool."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.engine.launcher import launch
from agentrl.engine.pool import EnginePool
from tests.engine import protocol_checks as checks
from tests.support.real_sglang import MARKS, sglang_settings

TOLERANCE = 0.02

pytestmark = MARKS


@pytest.fixture
async def pool(tiny_model: Path, tmp_path: Path) -> AsyncIterator[EnginePool]:
    settings = sglang_settings()
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
