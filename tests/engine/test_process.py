"""The supervisor of engine processes; `test_launcher` tests it with real processes."""

import logging
import os
from pathlib import Path

import anyio
import pytest

from agentrl.engine.commands import EngineCommand
from agentrl.engine.process import EngineProcess, _down, supervise
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import HttpTransport
from tests.engine.faults import ok, serving


@pytest.mark.slow
async def test_an_engine_that_is_paused_for_an_update_is_not_taken_for_hung() -> None:
    settings = EngineSettings(engine_hang_timeout=2.0, engine_probe_interval=0.5)
    async with serving(ok([5])) as server, HttpTransport(EngineSettings(engine_connect_timeout=1.0)) as transport:
        server.paused = True
        with anyio.move_on_after(3.5) as scope:
            await _down(EngineProcess(server.url), settings, transport)
        assert scope.cancelled_caught
        server.deaf = True
        with anyio.fail_after(120):
            assert "--engine-hang-timeout" in await _down(EngineProcess(server.url), settings, transport)


async def test_an_engine_that_is_not_started_again_any_more_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def command(port: int) -> EngineCommand:
        return EngineCommand(("false",), dict(os.environ))

    engine = EngineProcess("http://127.0.0.1:9", command, tmp_path / "log")
    engine.start()
    with caplog.at_level(logging.WARNING), anyio.fail_after(120):
        await supervise([engine], EngineSettings(engine_max_restarts=1))
    assert "ended with status 1; not started again (--engine-max-restarts)" in caplog.text
