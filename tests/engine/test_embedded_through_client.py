"""The built-in server, started by the launcher and driven through the client: the same checks as real SGLang passes."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.engine import EngineClient, EngineSettings, launch
from tests.engine import protocol_checks as checks

TOLERANCE = 1e-3


@pytest.fixture
async def client(tiny_model: Path, tmp_path: Path) -> AsyncIterator[EngineClient]:
    settings = EngineSettings(embedded_threads=1, embedded_slots=4, engine_start_timeout=100.0)
    async with (
        launch(settings, tiny_model, log_dir=tmp_path) as engines,
        EngineClient([engine.url for engine in engines], settings, vocab_size=512) as client,
    ):
        yield client


async def test_everything_an_engine_must_do(client: EngineClient, tiny_model: Path, other_model: Path):
    # One test and one server: each start costs seconds.
    assert await client.health() == {client.urls[0]: True}
    await checks.check_generate(client, tiny_model, TOLERANCE)
    await checks.check_abort(client)
    await checks.check_cancel(client)
    await checks.check_pause_update_resume(client, tiny_model, other_model, TOLERANCE)
    await checks.check_broadcast(client, tiny_model, TOLERANCE)
