"""Access to the viewer, and the resources that its pages may load."""

import re
from http.cookies import SimpleCookie

import httpx
import nicegui
import pytest
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from agentrl.viewer.access import TokenGate

SOCKET = "/_nicegui_ws/socket.io/?EIO=4&transport="
PATHS = ["/", "/t/0/2?at=1", f"/_nicegui/{nicegui.__version__}/static/nicegui.js", SOCKET + "polling", "/favicon.ico"]


def ask(url: str, **headers: str) -> httpx.Response:
    return httpx.get(url, headers=headers, timeout=120, trust_env=False)


def greeting(url: str, **headers: str) -> str:
    """Return the first message of the WebSocket."""
    with connect(url.replace("http", "ws", 1) + SOCKET + "websocket", additional_headers=headers, proxy=None) as socket:
        return str(socket.recv(120))


def cookie_of(url: str, token: str) -> str:
    return ask(f"{url}/curves?all=1&token={token}").headers["set-cookie"].partition(";")[0]


@pytest.mark.parametrize("path", PATHS)
def test_without_a_token_nothing_is_served_beyond_this_machine(shared: tuple[str, str], path: str) -> None:
    url, token = shared
    assert len(token) >= 22  # 128 bits
    wrong = cookie_of(url, token)[:-1]
    asked = f"{url}{path}{'&' if '?' in path else '?'}token="
    for refused in (ask(url + path), ask(asked), ask(asked + token[:-1] + "%ff"), ask(url + path, cookie=wrong)):
        assert refused.status_code == 403
        assert "needs the token" in refused.text
    assert ask(url + path, cookie=cookie_of(url, token)).status_code == 200


def test_a_token_in_the_address_becomes_a_cookie(shared: tuple[str, str]) -> None:
    url, token = shared
    moved = ask(f"{url}/curves?all=1&token={token}")
    assert (moved.status_code, moved.headers["location"]) == (303, f"{url}/curves?all=1")
    (cookie,) = SimpleCookie(moved.headers["set-cookie"]).values()
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "strict", "/")
    assert url.endswith(cookie.key.rpartition("-")[2])  # another viewer of this machine has another


def test_a_websocket_needs_the_cookie(shared: tuple[str, str]) -> None:
    url, token = shared
    for headers in ({}, {"cookie": cookie_of(url, token)[:-1]}):
        with pytest.raises(InvalidStatus) as refused:
            greeting(url, **headers)
        assert refused.value.response.status_code == 403
    assert greeting(url, cookie=cookie_of(url, token), origin=url).startswith('0{"sid"')


@pytest.mark.parametrize("path", PATHS)
def test_on_this_machine_no_token_is_asked_for(address: str, path: str) -> None:
    assert "token" not in address
    assert ask(address + path).status_code == 200
    assert greeting(address).startswith('0{"sid"')


def test_a_page_runs_its_own_scripts_only(address: str) -> None:
    policies = []
    for _ in range(2):
        page = ask(address)
        policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
        policies.append(policy["script-src"])
        nonce = re.fullmatch(r"'self' 'nonce-([\w-]{22})' 'unsafe-eval'", policy["script-src"])
        assert nonce is not None
        scripts = re.findall(r"<script[^>]*", page.text)
        assert len(scripts) > 5
        assert all(nonce[1] in script for script in scripts)
        assert {policy[name] for name in ("default-src", "object-src", "base-uri", "frame-ancestors")} == {"'none'"}
        assert policy["connect-src"] == "'self'"
    assert policies[0] != policies[1]


def test_what_is_neither_http_nor_a_websocket_passes_the_gate() -> None:
    began = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        began.append(scope["type"])
        for name in ("startup", "shutdown"):
            assert (await receive())["type"] == f"lifespan.{name}"
            await send({"type": f"lifespan.{name}.complete"})

    with TestClient(TokenGate(app, "token")) as client:
        assert client.get("/").status_code == 403
    assert began == ["lifespan"]
