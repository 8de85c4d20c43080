"""Servers that ask for a key: whatever we send them carries it, and who has none is told which setting it is."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.engine.embedded.server import build
from agentrl.engine.embedded.service import Options
from agentrl.engine.launcher import check_launch, launch
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.wire import SamplingParams
from agentrl.errors import EngineRejected, EngineUnreachable


class Keyed:
    """`app`, for those who know the key; also its health, though SGLang tells anybody that."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.refused: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and Headers(scope=scope).get("authorization") != "Bearer SEKRET":
            self.refused.append(scope["path"])
            return await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
        return await self._app(scope, receive, send)


@pytest.fixture
def keyed(tiny_model: Path) -> Iterator[tuple[str, Keyed]]:
    app = Keyed(build(Options(str(tiny_model), slots=4, dtype="float32"), on_crash=lambda: None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        yield "http://127.0.0.1:{1}".format(*listener.getsockname()), app
        server.should_exit = True
        thread.join(120)


def settings(url: str, **options: str) -> EngineSettings:
    return EngineSettings(
        engine="external", rollout_external_engine_addrs=(url,), sglang_options=options, engine_start_timeout=120.0
    )


@pytest.mark.parametrize("name", ["api_key", "api-key"])
async def test_requests_calls_and_probes_carry_the_key(keyed: tuple[str, Keyed], name: str, tmp_path: Path) -> None:
    url, app = keyed
    with_key = settings(url, **{name: "SEKRET"})
    await check_launch(with_key, 1)
    async with launch(with_key, "", log_dir=tmp_path), EnginePool([url], with_key, vocab_size=512) as pool:
        got = await pool.generate([1, 2], SamplingParams(temperature=1.0, max_new_tokens=3, ignore_eos=True))
        assert len(got.ids) == 3
        assert (await pool.model_info())[0]["is_generation"]
        assert await pool.epoch() == (f"{url}#0",)
    assert app.refused == []


async def test_who_has_no_key_is_told_which_setting_it_is(keyed: tuple[str, Keyed]) -> None:
    url, app = keyed
    async with EnginePool([url], settings(url), vocab_size=512) as pool:
        for ask in (pool.model_info(), pool.generate([1, 2], SamplingParams(temperature=1.0, max_new_tokens=3))):
            with pytest.raises(EngineRejected, match="answered 401: Unauthorized; --sglang-api-key"):
                await ask
    assert {"/model_info", "/generate"} <= set(app.refused)


async def test_a_key_and_a_password_at_once_are_an_error_of_ours(keyed: tuple[str, Keyed]) -> None:
    url = keyed[0].replace("://", "://user:word@")
    with pytest.raises(EngineUnreachable, match="AUTHORIZATION") as raised:
        await check_launch(settings(url, api_key="SEKRET"), 1)
    assert "word" not in str(raised.value).replace("--rollout", "")
