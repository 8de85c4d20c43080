"""An engine without a model: it answers with prepared tokens after a delay for each token, in SGLang's protocol.

1. A separate process with a bare asyncio HTTP server, so that the run pays next to nothing. Any number of requests
   run at once and none slows another down.
2. Every answer is the tool call of `benchmarks.slow_tools` behind some filler, whose length depends on the session's
   sample and turn. A request that continues an interrupted answer asks for fewer new tokens, and gets the rest.
3. Pausing ends requests with the tokens they have (`abort`) or freezes them. A token carries the weight version at the
   end of its delay. A weight update changes the version and nothing else.
"""

import asyncio
import multiprocessing
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from benchmarks.slow_tools import CALL, CALL_TOKENS, MAX_FILLER, TOKEN_SECONDS, TURNS, turn_tokens
from tests.support.tiny_models import make_tokenizer

CONTEXT = 2048
LONGEST_ANSWER = CALL_TOKENS + MAX_FILLER
"""The required value of `--rollout-max-response-len`."""
FILLER = " the"


@dataclass(slots=True)
class _Request:
    """One `/generate` in flight: its answer, and the number of tokens that are already sampled."""

    connection: "_Connection"
    rid: str
    session: str
    prompt_tokens: int
    ids: list[int]
    pieces: list[str]
    given: int = 0
    since: float = 0.0
    spans: list[tuple[str, int]] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class _Engine:
    """The state that all connections share."""

    def __init__(self, token_seconds: float, ids: Sequence[int], pieces: Sequence[str], filler: int) -> None:
        self.delay, self.version, self.paused = token_seconds, "", False
        self._ids, self._pieces, self._filler = list(ids), list(pieces), filler
        self._live: dict[str, _Request] = {}
        self._turns: dict[str, int] = {}

    def handle(self, connection: "_Connection", path: str, raw: bytes) -> None:
        body: dict[str, Any] = orjson.loads(raw) if raw else {}
        path = path.partition("?")[0]
        match path:
            case "/generate":
                self._generate(connection, body)
                return
            case "/abort_request":
                rid, everything = body.get("rid") or "", body.get("abort_all")
                for request in [r for r in self._live.values() if everything or (rid and r.rid.startswith(rid))]:
                    self._end(request, "abort")
            case "/pause_generation":
                self._pause(body["mode"])
            case "/continue_generation":
                self.paused = False
                for request in self._live.values():
                    self._run(request)
            case "/update_weights_from_disk":
                for request in self._live.values():
                    self._stop_clock(request)
                self.version = body["weight_version"]
                for request in [] if self.paused else self._live.values():
                    self._run(request)
            case "/health" | "/health_generate" | "/flush_cache":
                pass
            case "/model_info" | "/get_model_info" | "/server_info" | "/get_server_info":
                connection.answer({"weight_version": self.version, "context_length": CONTEXT, "model_path": "delay"})
                return
            case _:
                connection.answer({"error": {"message": f"no {path} here"}}, 404)
                return
        connection.answer({"success": True, "message": ""})

    def _generate(self, connection: "_Connection", body: dict[str, Any]) -> None:
        session = connection.session
        index, turn = int(session.split("-")[1]), self._turns.get(session, 0) % TURNS + 1
        filler = turn_tokens(index, turn) - CALL_TOKENS
        ids = [self._filler] * filler + self._ids
        before = LONGEST_ANSWER - body["sampling_params"]["max_new_tokens"]
        pieces = [FILLER] * filler + self._pieces
        request = _Request(connection, body["rid"], session, len(body["input_ids"]), ids[before:], pieces[before:])
        self._live[request.rid] = connection.request = request
        if not self.paused:
            self._run(request)

    def _run(self, request: _Request) -> None:
        if request.timer is not None:
            return
        request.since = time.monotonic()
        left = (len(request.ids) - request.given) * self.delay
        request.timer = asyncio.get_running_loop().call_later(left, self._end, request, "stop")

    def _stop_clock(self, request: _Request) -> None:
        """Count the tokens whose delay has passed, under the current weight version."""
        if request.timer is None:
            return
        request.timer.cancel()
        request.timer = None
        done = int((time.monotonic() - request.since) / self.delay)
        request.given = min(len(request.ids) - 1, request.given + done)  # the last token ends the request
        request.spans.append((self.version, request.given))

    def _pause(self, mode: str) -> None:
        self.paused = True
        for request in list(self._live.values()):
            if mode == "abort":
                self._end(request, "abort")
            else:
                self._stop_clock(request)

    def forget(self, request: _Request) -> None:
        """Remove a request whose client has disconnected."""
        self._stop_clock(request)
        self._live.pop(request.rid, None)

    def _end(self, request: _Request, why: str) -> None:
        self._stop_clock(request)
        self._live.pop(request.rid, None)
        if why == "stop":
            request.given = len(request.ids)
            request.spans[-1] = (self.version, request.given)
            self._turns[request.session] = self._turns.get(request.session, 0) + 1
        ids = request.ids[: request.given]
        starts = [0, *(end for _, end in request.spans)]
        meta = {
            "id": request.rid,
            "finish_reason": {"type": "stop", "matched": ids[-1]} if why == "stop" else {"type": "abort"},
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.version,
            "weight_versions": [
                {"version": version, "start": start, "end": end}
                for start, (version, end) in zip(starts, request.spans, strict=False)
            ],
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
        }
        text = "".join(request.pieces[: request.given])
        request.connection.request = None
        request.connection.answer({"text": text, "output_ids": ids, "meta_info": meta})


class _Connection(asyncio.Protocol):
    """HTTP/1.1 with content lengths, one request after another."""

    def __init__(self, engine: _Engine) -> None:
        self._engine, self._buffer = engine, b""
        self.session = ""
        self.request: _Request | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self.request is not None:
            self._engine.forget(self.request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        self.session = headers.get("x-smg-routing-key", "")
        self._engine.handle(self, lines[0].split(" ")[1], rest[:length])

    def answer(self, value: object, status: int = 200) -> None:
        body = orjson.dumps(value)
        head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


def _serve(listening: socket.socket, token_seconds: float) -> None:
    tokenizer = make_tokenizer()
    ids: list[int] = tokenizer.encode(CALL, add_special_tokens=False)
    (filler,) = tokenizer.encode(FILLER, add_special_tokens=False)
    assert len(ids) == CALL_TOKENS, f"the call has {len(ids)} tokens"
    pieces = [str(tokenizer.decode([token], skip_special_tokens=True)) for token in ids]

    async def serve() -> None:
        engine = _Engine(token_seconds, ids, pieces, filler)
        server = await asyncio.get_running_loop().create_server(lambda: _Connection(engine), sock=listening)
        await server.serve_forever()

    asyncio.run(serve())


@contextmanager
def delay_engine(scale: float) -> Iterator[str]:
    """Yield the address of an engine in a separate process. All its seconds are multiplied by `scale`."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_serve, args=(listening, TOKEN_SECONDS * scale), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        process.terminate()
        process.join()
