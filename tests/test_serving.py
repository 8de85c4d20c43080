"""Requests that every server of ours refuses, and their limits, tested through a socket."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from agentrl.sandbox.inside import bridge
from agentrl.serving import server as serving
from agentrl.serving.server import Guarded, read_json

JSON = {"content-type": "application/json"}


async def echo(request: Request) -> Response:
    try:
        return JSONResponse({"got": await read_json(request)})
    except ValueError as error:
        return JSONResponse({"said": str(error)}, 400)


async def hold(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("here")
    await socket.send_text(await socket.receive_text())


@pytest.fixture(scope="module")
def limits() -> Iterator[None]:
    """Set small limits, so that tests need not send much or wait long."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MAX_BODY": 100_000, "MAX_HEAD": 4096, "READ_TIMEOUT": 1}.items():
            patch.setattr(serving, name, value)
        yield


@pytest.fixture(scope="module")
def address(limits: None) -> Iterator[tuple[str, int]]:
    with running("127.0.0.1") as found:
        yield found


@contextlib.contextmanager
def running(name: str) -> Iterator[tuple[str, int]]:
    """Run a server that was started with the name `name`."""
    routes = [Route("/", echo, methods=["GET", "POST"]), WebSocketRoute("/socket", hold)]
    app = Guarded(Starlette(routes=routes), name)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, http=serving._Protocol, log_level="error", timeout_keep_alive=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        yield listener.getsockname()
        server.should_exit = True
        thread.join(120)


def ask(address: tuple[str, int], headers: dict[str, str], content: Any = None, method: str = "POST") -> httpx.Response:
    url = f"http://127.0.0.1:{address[1]}/"
    return httpx.request(method, url, headers=headers, content=content, trust_env=False)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:1",
        "localhost",
        "LOCALHOST:9",
        "192.0.2.7:30000",
        "[::1]:80",
        "0.0.0.0",
        "engine-0:1",
        socket.gethostname(),
    ],
)
def test_addresses_and_known_names_are_served(address: tuple[str, int], host: str) -> None:
    assert ask(address, {"host": host}, method="GET").json() == {"got": None}


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "[::1", "a@b"])
def test_a_name_that_is_not_the_servers_is_refused(address: tuple[str, int], host: str) -> None:
    refused = ask(address, {"host": host}, method="GET")
    assert refused.status_code == 421
    assert "--host" in refused.json()["error"]["message"]


def test_the_name_that_it_was_started_with_is_known() -> None:
    with running("Engine.example") as address:
        assert ask(address, {"host": "engine.example:1"}).status_code == 200


NEIGHBOUR = {"origin": "http://localhost:3000", "sec-fetch-site": "cross-site"}
"""The headers that a browser sends if a page of this machine requests 127.0.0.1."""


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost:3000"},
        {"origin": "http://127.0.0.1"},
        NEIGHBOUR,
        {"origin": "http://192.0.2.7:8800", "host": "192.0.2.7:8800"},
    ],
)
def test_programs_and_pages_of_this_machine_and_its_own_are_served(
    address: tuple[str, int], headers: dict[str, str]
) -> None:
    assert ask(address, headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1.evil.example"},
        {"origin": "http://192.0.2.7"},
        {"origin": "http://192.0.2.7:8801", "host": "192.0.2.7:8800"},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_pages_of_others_are_refused(address: tuple[str, int], headers: dict[str, str]) -> None:
    assert ask(address, headers).status_code == 403


@pytest.mark.parametrize("kind", ["text/plain", "text/plain; a=json", "application/x-www-form-urlencoded", ""])
def test_a_body_must_say_that_it_is_json(address: tuple[str, int], kind: str) -> None:
    refused = ask(address, {"content-type": kind} if kind else {}, b"{}")
    assert refused.status_code == 400
    assert "application/json" in refused.json()["said"]
    assert ask(address, {"content-type": "Application/JSON; charset=utf-8"}, b"{}").json() == {"got": {}}


def test_a_body_may_be_as_large_as_the_limit_and_no_larger(address: tuple[str, int]) -> None:
    def body(size: int) -> bytes:
        return b'"' + b"a" * (size - 2) + b'"'

    assert ask(address, JSON, body(100_000)).status_code == 200
    for content in (body(100_001), (piece for piece in [body(60_000)] * 3)):
        refused = ask(address, JSON, content)
        assert refused.status_code == 413
        assert "100000 bytes" in refused.text


def send(address: tuple[str, int], content: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", address[1]), timeout=120)
    connection.sendall(content)
    return connection


HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize("content", [b"", b"POST / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n", HEAD % 9 + b"{"])
def test_what_does_not_come_is_not_waited_for(address: tuple[str, int], content: bytes) -> None:
    began = time.monotonic()
    with send(address, content) as connection:
        answer = connection.recv(1000)
    assert time.monotonic() - began > 0.5
    assert answer[9:12] == (b"408" if content.startswith(b"POST / HTTP") else b"")


def test_the_next_head_is_not_waited_for_either(address: tuple[str, int]) -> None:
    """Sending it byte by byte does not help. A complete head in time is served."""
    client = HTTPConnection(*address, timeout=120)
    for number in (1, 2):
        client.request("POST", "/", str(number), JSON)
        assert json.loads(client.getresponse().read()) == {"got": number}
    began = time.monotonic()
    client.sock.settimeout(0.05)
    closed = any(is_closed_after(client.sock, bytes([byte])) for byte in HEAD * 2)
    client.close()
    assert closed
    assert time.monotonic() - began > 0.5


def is_closed_after(connection: socket.socket, byte: bytes) -> bool:
    """Return true if the server has closed the connection: with EOF, or with a reset if a byte arrived in between."""
    try:
        connection.sendall(byte)
        return connection.recv(1000) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_head_without_an_end_is_cut_off(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "READ_TIMEOUT", 1000)  # limited by size, not by time
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 10_000
    with send(address, head) as connection, contextlib.suppress(ConnectionError):
        assert connection.recv(1000) == b""


@given(
    depth=st.integers(1, 200), shape=st.sampled_from(["[{}]", '{{"a":{}}}', '[1,{{"a":{}}}]']), width=st.integers(0, 90)
)
def test_depth_is_what_it_says(depth: int, shape: str, width: int) -> None:
    text = json.dumps([[]] * width)
    for _ in range(depth):
        text = shape.format(text)
    real = 1 + (1 if width else 0) + depth * (2 if shape.startswith("[1") else 1)
    if real <= serving.MAX_DEPTH:
        assert serving._decode(text.encode()) == json.loads(text)
    else:
        with pytest.raises(ValueError, match="JSON may nest 64 levels deep"):
            serving._decode(text.encode())


def test_brackets_in_text_are_no_depth_and_too_many_marks_are_refused() -> None:
    assert serving._decode(b'"' + b"[" * 1000 + b'"') == "[" * 1000
    with pytest.raises(ValueError, match=r"of the characters \[ { and :, got 300001"):
        serving._decode(b"[" + b"[]," * 300_000 + b"1]")
    with pytest.raises(ValueError, match="depth limit"):
        serving._decode(b"[" * 5000)


@pytest.mark.parametrize(("origin", "allowed"), [("http://127.0.0.1:3", True), ("http://evil.example", False)])
def test_a_socket_is_no_way_around_the_checks(address: tuple[str, int], origin: str, allowed: bool) -> None:
    refused = contextlib.nullcontext() if allowed else pytest.raises(InvalidStatus, match="403")
    with refused, connect(f"ws://127.0.0.1:{address[1]}/socket", additional_headers={"origin": origin}) as socket:
        assert socket.recv(10) == "here"


def test_a_socket_may_wait_longer_than_a_request(address: tuple[str, int]) -> None:
    with connect(f"ws://127.0.0.1:{address[1]}/socket") as socket:
        assert socket.recv(10) == "here"
        with pytest.raises(TimeoutError):
            socket.recv(1.5 * serving.READ_TIMEOUT)
        socket.send("still here")
        assert socket.recv(10) == "still here"


def test_small_answers_are_sent_at_once() -> None:
    """With Nagle's algorithm the body of an answer would wait 40 ms for the acknowledgement of its head."""
    with serving.listen("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_sandbox_forwards_small_parts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[socket.socket]()

    def create_server(*args: Any, **options: Any) -> socket.socket:
        made.append(socket_create_server(*args, **options))
        return made[0]

    socket_create_server = socket.create_server
    monkeypatch.setattr(socket, "create_server", create_server)
    bridge.listen(0, "/nowhere")
    assert made[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
