"""Servers that require a key: every request of ours carries it, and an error without a key names the setting."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from aiohttp import web
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.cli import serve
from agentrl.engine.commands import engine_command
from agentrl.engine.embedded import server
from agentrl.engine.embedded.server import build
from agentrl.engine.embedded.service import Options
from agentrl.engine.launcher import check_launch, launch
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.wire import SamplingParams
from agentrl.errors import EngineRejected, EngineUnreachable
from agentrl.serving.http import RequestError, refusal
from tests.engine.faults import FaultyServer, serving
from tests.support.nightly import nightly


class Keyed:
    """`app` behind a key. Its health is too, although SGLang's needs no key."""

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


async def test_an_error_without_a_key_names_the_setting(keyed: tuple[str, Keyed]) -> None:
    url, app = keyed
    async with EnginePool([url], settings(url), vocab_size=512) as pool:
        for ask in (pool.model_info(), pool.generate([1, 2], SamplingParams(temperature=1.0, max_new_tokens=3))):
            with pytest.raises(EngineRejected, match="answered 401: Unauthorized; --sglang-api-key"):
                await ask
    assert {"/model_info", "/generate"} <= set(app.refused)


CONTROL = [
    ("GET", "/flush_cache"),
    *((("POST"), f"/{each.__name__}") for each in server.CONTROL),
]


def asked(options: Options, method: str, path: str, **headers: str) -> int:
    """Return the status of an application's answer, without its model: keys are checked first."""
    app = Starlette(routes=server.routes_of(options, {}), exception_handlers={RequestError: refusal})
    app.state.service = None
    client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    return client.request(
        method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    ).status_code


@pytest.mark.parametrize(("method", "path"), nightly(CONTROL, 3))
def test_control_is_for_those_who_know_its_key(method: str, path: str) -> None:
    """Like SGLang 0.5.23: the admin key if there is one, else the API key."""
    bare, one = Options("m"), Options("m", api_key="A")
    both, admin = Options("m", api_key="A", admin_api_key="B"), Options("m", admin_api_key="B")
    for options, key in ((one, "A"), (both, "B"), (admin, "B")):
        assert asked(options, method, path) == 401
        assert asked(options, method, path, authorization="Bearer AB") == 401
        assert asked(options, method, path, authorization=f"Bearer {key}") not in (401, 403)
    assert asked(both, method, path, authorization="Bearer A") == 401
    assert asked(bare, method, path) not in (401, 403)
    for browser in ({"origin": "http://localhost:8000"}, {"sec_fetch_site": "same-site"}):
        assert asked(bare, method, path, **browser) == 403


@pytest.mark.parametrize(("method", "path"), [("POST", "/generate"), ("GET", "/model_info"), ("GET", "/server_info")])
def test_all_else_is_for_those_who_know_the_api_key(method: str, path: str) -> None:
    one = Options("m", api_key="A", admin_api_key="B")
    assert asked(one, method, path) == 401
    assert asked(one, method, path, authorization="Bearer B") == 401
    assert asked(one, method, path, authorization="Bearer A") != 401
    assert asked(Options("m", admin_api_key="B"), method, path, origin="http://localhost:8000") not in (401, 403)


@pytest.mark.slow
async def test_engines_that_are_started_here_get_a_key_that_no_command_line_shows(
    tiny_model: Path, tmp_path: Path
) -> None:
    own = EngineSettings(embedded_slots=4, engine_start_timeout=300.0)
    assert own.admin_api_key
    async with (
        launch(own, tiny_model, log_dir=tmp_path) as engines,
        EnginePool([engines[0].url], own, vocab_size=512) as pool,
    ):
        async with httpx.AsyncClient() as anybody:
            refused = await anybody.post(f"{engines[0].url}/pause_generation", json={})
            told = await anybody.get(f"{engines[0].url}/server_info")
        assert refused.status_code == 401
        assert own.admin_api_key not in told.text
        await pool.pause()
        await pool.resume()
        shown = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(own.admin_api_key.encode() in line for line in shown)


def test_which_key_goes_to_control(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineSettings(engine="external", rollout_external_engine_addrs=("a:1",)).admin_api_key is None
    assert EngineSettings(sglang_options={"api_key": "A"}).admin_api_key is None
    assert EngineSettings(sglang_options={"admin-api-key": "B"}).admin_api_key == "B"
    monkeypatch.setenv("SGLANG_ADMIN_API_KEY", "C")
    assert settings("a:1").admin_api_key == "C"


def test_sglang_gets_both_keys_and_no_random_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_ADMIN_API_KEY", raising=False)
    assert EngineSettings(engine="sglang").admin_api_key is None
    monkeypatch.setenv("SGLANG_API_KEY", "A")
    monkeypatch.setenv("SGLANG_ADMIN_API_KEY", "B")
    given = engine_command(EngineSettings(engine="sglang"), "model", 1, host="127.0.0.1").arguments
    assert [given[given.index(f"--{name}") + 1] for name in ("api-key", "admin-api-key")] == ["A", "B"]


def test_a_key_is_read_without_spaces_around_it_and_an_empty_one_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret that a shell wrote into a file ends with a line break."""
    for name in ("SGLANG_API_KEY", "SGLANG_ADMIN_API_KEY"):
        monkeypatch.setenv(name, "")
    assert EngineSettings().api_key is None
    assert EngineSettings().admin_api_key == EngineSettings().admin_api_key is not None
    monkeypatch.setenv("SGLANG_API_KEY", "A\n")
    monkeypatch.setenv("SGLANG_ADMIN_API_KEY", " B\n")
    assert (EngineSettings().api_key, EngineSettings().admin_api_key) == ("A", "B")
    given = engine_command(EngineSettings(engine="sglang"), "model", 1, host="127.0.0.1").arguments
    assert [given[given.index(f"--{name}") + 1] for name in ("api-key", "admin-api-key")] == ["A", "B"]
    with serve.command.make_context("serve", ["model"]) as context:
        assert (context.params["api_key"], context.params["admin_api_key"]) == ("A", "B")


async def test_texts_are_encoded_with_the_key_of_requests() -> None:
    seen: list[str] = []

    async def keyed(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        seen.append(request.headers["authorization"])
        return web.json_response({"meta_info": {"input_token_logprobs": [[None, 7, None]]}})

    async with serving(keyed) as server:
        both = settings(server.url, **{"api-key": "A", "admin-api-key": "B"})
        async with EnginePool([server.url], both, vocab_size=None) as pool:
            assert list((await pool.encode("text")).values()) == [[7]]
    assert seen == ["Bearer A"]


async def test_a_key_and_a_password_at_once_are_an_error_of_ours(keyed: tuple[str, Keyed]) -> None:
    url = keyed[0].replace("://", "://user:word@")
    with pytest.raises(EngineUnreachable, match="AUTHORIZATION") as raised:
        await check_launch(settings(url, api_key="SEKRET"), 1)
    assert "word" not in str(raised.value).replace("--rollout", "")
