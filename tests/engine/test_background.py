"""Background tasks of a context."""

import logging

import anyio
import pytest

from agentrl.engine.transport import beside


async def test_what_went_wrong_is_logged_when_it_does_and_raised_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def wrong() -> None:
        raise ValueError("this way")

    logged: list[str] = []

    async def run() -> None:
        async with beside(wrong()):
            with anyio.fail_after(120):
                while not caplog.text:
                    await anyio.lowlevel.checkpoint()
            logged.append(caplog.text)

    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="this way"):
        await run()
    assert "ValueError: this way" in logged[0]
