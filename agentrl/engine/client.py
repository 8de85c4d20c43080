"""`EngineClient`: generate on a set of engines over SGLang's HTTP protocol, ids in, ids and log-probs out.

1. One call of `generate` returns exactly one answer, or raises `EngineTimeout`, `EngineUnreachable` or
   `EngineRejected`. The deadline covers everything: waiting for a free place, retries and the answer.
2. A session's turns go to one engine as long as it lives (`balance`); at most `sglang_server_concurrency`
   requests are in flight at one engine.
3. Retried are: a refused or lost connection (elsewhere where possible, under a fresh request id, after the old id
   was aborted as far as that can be reached) and the answers 429, 502 and 503 (after a growing wait). An answer
   with tokens in it ends the call, so tokens are never counted twice; every other status raises at once.
4. Cancelling a call, or its deadline, sends `abort_request` for it, so that the engine stops too.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import anyio
import orjson

from agentrl.engine.balance import Balance, EngineState
from agentrl.engine.control import EngineControl
from agentrl.engine.prompts import PromptEncoder
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import ConnectionLost, ConnectionRefused
from agentrl.engine.wire import Generation, SamplingParams, error_message
from agentrl.errors import EngineFailure, EngineRejected, EngineTimeout, EngineUnreachable

ROUTING_HEADER: Final = "X-SMG-Routing-Key"
"""Header by which SGLang's routers keep a session on one worker."""

_BUSY = frozenset({429, 502, 503})
_ABORT_TIMEOUT = 2.0
_MAX_BACKOFF = 10.0


@dataclass(slots=True)
class _Live:
    """A `generate` call under way: where it is and under which request id."""

    engine: EngineState
    rid: str


class EngineClient(EngineControl):
    """Generation and control over one or more engines; an async context manager, safe for concurrent calls.

    Args:
        urls: the engines, as `host:port` or `http://host:port`.
        settings: limits and patience.
        vocab_size: where given, prompts with ids outside [0, vocab_size) are refused before they are sent,
            because such an id ends a real SGLang server.
        generate_options: more top-level fields for every `/generate` call, such as `return_routed_experts`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        settings: EngineSettings | None = None,
        *,
        vocab_size: int | None = None,
        generate_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(urls, settings)
        self._prompts = PromptEncoder(vocab_size)
        self._options = {"return_logprob": True, **(generate_options or {})}
        self._balance = Balance(self.urls)
        self._places = {
            engine.url: anyio.Semaphore(self.settings.sglang_server_concurrency, fast_acquire=True)
            for engine in self._balance.engines
        }
        self._generate_urls = {url: url + "/generate" for url in self.urls}
        self._live: dict[str, _Live] = {}

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams | Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
        deadline: float | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Sample one continuation of `input_ids`.

        Args:
            input_ids: the whole prompt.
            params: how to sample; a mapping is sent as it is.
            rid: request id of the first attempt, for `abort`; default a fresh one. SGLang also aborts requests
                whose id merely starts with an aborted one, so ids should not be prefixes of each other.
            session_id: turns of one conversation share it and stay on one engine.
            deadline: seconds for the whole call; default `engine_request_timeout`.
            options: more top-level fields for this call.

        Raises:
            EngineTimeout: the deadline passed.
            EngineUnreachable: no engine gave an answer within `engine_max_retries` retries.
            EngineRejected: the engine refused the request (`status`), or its answer is malformed; kind
                `context_overflow` where the prompt or the answer does not fit.
        """
        payload = {
            **self._options,
            **(options or {}),
            "sampling_params": params.to_wire() if isinstance(params, SamplingParams) else dict(params),
            "input_ids": orjson.Fragment(self._prompts.encode(input_ids, session_id)),
        }
        headers = None if session_id is None else {ROUTING_HEADER: session_id}
        seconds = self.settings.engine_request_timeout if deadline is None else deadline
        name = rid or uuid.uuid4().hex
        try:
            with anyio.fail_after(seconds):
                return await self._attempts(name, payload, headers, session_id)
        except TimeoutError:
            raise EngineTimeout(f"no answer to a prompt of {len(input_ids)} tokens within {seconds:g} s") from None

    async def abort(self, rid: str) -> None:
        """End the request that was started as `rid`; its `generate` returns what there is, finish type `abort`.

        An unknown or finished id does nothing.
        """
        live = self._live.get(rid)
        urls = self.urls if live is None else (live.engine.url,)
        await self._each(urls, self._abort_at, live.rid if live else rid)

    def end_session(self, session_id: str) -> None:
        """Forget where a finished conversation was; optional, old sessions are forgotten anyway."""
        self._balance.forget(session_id)
        self._prompts.forget(session_id)

    # ---- attempts -----------------------------------------------------------------------------------------

    async def _attempts(
        self, name: str, payload: dict[str, Any], headers: dict[str, str] | None, session_id: str | None
    ) -> Generation:
        rid = name
        for attempt in range(self.settings.engine_max_retries + 1):
            last = attempt == self.settings.engine_max_retries
            engine = self._balance.choose(session_id, time.monotonic())
            try:
                async with self._places[engine.url]:
                    self._live[name] = _Live(engine, rid)
                    status, raw = await self._send(engine, rid, payload, headers)
            except EngineUnreachable as error:
                self._balance.mark_dead(engine, time.monotonic())
                if last:
                    raise EngineUnreachable(f"{error} (after {attempt + 1} attempts)", kind=error.kind) from error
                rid = uuid.uuid4().hex
                wait = not self._balance.any_usable(time.monotonic())
            else:
                self._balance.mark_alive(engine)
                if status == 200:
                    return Generation.from_wire(_parsed(raw, engine.url))
                if status not in _BUSY or last:
                    raise _rejected(status, raw, engine.url)
                wait = True
            finally:
                self._balance.release(engine)
                self._live.pop(name, None)
            if wait:
                await anyio.sleep(min(self.settings.engine_retry_backoff * 2.0**attempt, _MAX_BACKOFF))
        raise AssertionError("the last attempt returns or raises")

    async def _send(
        self, engine: EngineState, rid: str, payload: dict[str, Any], headers: dict[str, str] | None
    ) -> tuple[int, bytes]:
        payload["rid"] = rid
        body = orjson.dumps(payload)
        try:
            return await self._transport.exchange("POST", self._generate_urls[engine.url], body, headers)
        except ConnectionRefused:
            raise
        except (ConnectionLost, anyio.get_cancelled_exc_class()):
            # The engine may still be sampling for nobody.
            await self._abandon(engine.url, rid)
            raise

    async def _abandon(self, url: str, rid: str) -> None:
        """Tell an engine to stop; if it cannot be told it has nothing left to stop."""
        with anyio.move_on_after(_ABORT_TIMEOUT, shield=True):
            try:
                await self._abort_at(url, rid)
            except EngineFailure:
                return

    async def _abort_at(self, url: str, rid: str) -> None:
        await self._call(url, "POST", "/abort_request", {"rid": rid})


def _parsed(raw: bytes, url: str) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise EngineRejected(
            f"malformed engine answer: {url} sent {len(raw)} bytes that are not JSON ({error})",
            status=200,
            kind="malformed_answer",
        ) from error


def _rejected(status: int, raw: bytes, url: str) -> EngineRejected:
    message = error_message(raw)
    overflow = status == 400 and "context length" in message
    kind = "context_overflow" if overflow else "engine_rejected" if status < 500 else "engine_error"
    return EngineRejected(f"{url} answered {status}: {message}", status=status, kind=kind)
