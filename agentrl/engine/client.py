"""The HTTP calls to one engine of a pool. A control call succeeds or raises an `EngineFailure`, within
`engine_control_timeout`. A call that joins a group or receives a broadcast waits for the other ranks. `break_off` fails
all calls if the engine is unreachable."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import anyio
import orjson

from agentrl.engine.answers import error_message
from agentrl.engine.load_balancer import EngineState
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import ConnectionLost, Headers, HttpTransport, Reply, Sink
from agentrl.engine.weights import WHOLE, Bucket, DiskUpdate, WeightGroup
from agentrl.errors import EngineFailure, EngineRejected, EngineTimeout, EngineUnreachable
from agentrl.settings import shown

_log = logging.getLogger(__name__)
PauseMode = Literal["abort", "in_place", "retract"]

_FLUSH_TIMEOUT, _ABORT_TIMEOUT, _TRY_AGAIN = 60.0, 2.0, 1.0
_FLAT = {"load_format": "flattened_bucket", "flush_cache": True}
_OPEN = ("/model_info", "/server_info", "/generate")  # calls that need `--api-key`, not `--admin-api-key`


class EngineClient(EngineState):
    """The engine at `url`."""

    def __init__(self, url: str, transport: HttpTransport, settings: EngineSettings) -> None:
        super().__init__(url)
        self.incarnation = 0  # number of losses; the engine has left all groups that it joined before a loss
        self.recovering, self.unrecovered = False, ""  # a probe does so now; why the last one did not
        self.places = anyio.Semaphore(settings.sglang_server_concurrency, fast_acquire=True)  # for requests in flight
        self._transport, self._timeout = transport, settings.engine_control_timeout
        self._has_update_sessions, self._calls = True, set[anyio.CancelScope]()
        self._started: Any = None
        self._adapters = set[str]()  # that it may have: an answer to a load can be lost
        self._given_back = frozenset[str]()

    def break_off(self) -> None:
        """Fail all calls in flight: the engine is unreachable."""
        self.incarnation += 1
        for scope in self._calls:
            scope.cancel()

    async def ask(self, path: str, rid: str, body: bytes | None, headers: Headers, sink: Sink = None) -> Reply:
        """Return the answer of `path`, without a time limit. A lost or cancelled call is aborted at the engine."""
        incarnation = self.incarnation
        try:
            return await self._exchange("GET" if body is None else "POST", self.url + path, body, headers, sink)
        except (ConnectionLost, anyio.get_cancelled_exc_class()):
            # The engine may still sample for this call. A failed abort is ignored.
            if incarnation == self.incarnation:
                with anyio.move_on_after(_ABORT_TIMEOUT, shield=True), suppress(EngineFailure):
                    await self.abort(rid)
            raise

    async def answers(self, path: str, timeout: float) -> bool:
        """Return true if `path` (`/health`, say) answers 200 within `timeout` seconds."""
        with anyio.move_on_after(timeout), suppress(EngineUnreachable):
            return (await self._transport.exchange("GET", self.url + path)).status == 200
        return False

    async def hangs(self, seconds: float) -> bool:
        """Return true if the server answers, but its scheduler does not for this many seconds. Return false as soon as
        the scheduler answers, or if the server is unreachable."""
        with anyio.move_on_after(seconds) as scope, suppress(EngineUnreachable):
            url = f"{self.url}/health_generate"
            while (await self._transport.exchange("GET", url)).status == 503:  # noqa: ASYNC110 - there is no event
                await anyio.sleep(_TRY_AGAIN)
        return scope.cancelled_caught

    async def _exchange(self, method: str, url: str, body: bytes | None, headers: Headers, sink: Sink = None) -> Reply:
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                return await self._transport.exchange(method, url, body, headers, sink)
            finally:
                self._calls.discard(scope)
        raise ConnectionLost(f"the engine at {self.url} does not answer any more", kind="engine_lost")

    async def model_info(self) -> dict[str, Any]:
        """Return `/model_info`: model_path, weight_version and more."""
        return await self._object("/model_info")

    async def server_info(self) -> dict[str, Any]:
        """Return `/server_info`: all server options and the version."""
        return await self._object("/server_info")

    async def encode(self, text: str) -> list[int]:
        """Return the ids of `text` by the engine's own tokenizer."""
        body = {"text": text, "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
        answer = await self._call("POST", "/generate", body)
        try:
            return [triple[1] for triple in answer["meta_info"]["input_token_logprobs"]]
        except (KeyError, TypeError, IndexError) as error:
            said = f"/generate should answer a text with input_token_logprobs, got {answer!r:.120}"
            raise self._not_sglang(said) from error

    async def abort(self, rid: str) -> None:
        """End a request, which then answers with its tokens so far. An unknown id does nothing."""
        await self._call("POST", "/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """End every request; each request answers with its tokens so far."""
        await self._call("POST", "/abort_request", {"rid": "", "abort_all": True})

    async def pause(self, mode: PauseMode) -> None:
        """Pause generation. `abort` ends all requests, `in_place` freezes them, `retract` returns them to the queue."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Resume generation after `pause`, with the present weights."""
        await self._call("POST", "/continue_generation", {})

    async def flush_cache(self) -> None:
        """Drop all cached prefixes. If requests still run, wait for their end first."""
        try:
            await self._call("POST", "/flush_cache")  # with a timeout, a server would wait for retracted requests too
        except EngineRejected:
            await self._call("POST", f"/flush_cache?timeout={_FLUSH_TIMEOUT:g}")

    async def set_resident_memory(self, memory: frozenset[str]) -> None:
        """Allocate this part of `WHOLE` and free the rest; no request may be running. SGLang exits if it is asked to
        allocate memory that it has. So this client records the freed parts until the server restarts."""
        if memory == WHOLE and not self._given_back:
            return
        info = await self.server_info()
        if info.get("enable_memory_saver") is not True:
            said = f"{self.url} cannot free its memory for the trainer"
            remedy = "start it with --enable-memory-saver, or set --no-offload-rollout"
            raise EngineRejected(f"{said}; {remedy}", kind="no_memory_saver")
        if self._started != info.get("startup_time"):
            self._started, self._given_back = info.get("startup_time"), frozenset()
        if back := self._given_back & memory:
            await self._call("POST", "/resume_memory_occupation", {"tags": sorted(back)})
            self._given_back -= back
        if rest := WHOLE - memory - self._given_back:
            if "weights" in rest and self._adapters and info.get("enable_weights_cpu_backup") is not True:
                said = f"{self.url} would lose the base weights of its adapter: updates send the adapter alone"
                remedy = "Start it with --enable-weights-cpu-backup, or set --no-offload-rollout"
                raise EngineRejected(f"{said}. {remedy}", kind="no_weights_backup")
            await self.flush_cache()
            await self._call("POST", "/release_memory_occupation", {"tags": sorted(rest)})
            self._given_back |= rest

    async def load_folder(self, update: DiskUpdate, version: str, *, flush_cache: bool = True) -> None:
        """Load the weights of a folder. An engine that is not paused finishes its requests first."""
        if update.adapter is None:
            body = {"model_path": update.folder, "weight_version": version, "flush_cache": flush_cache}
            await self._call("POST", "/update_weights_from_disk", body)
            return
        await self._unload(self._adapters & {update.adapter})
        self._adapters.add(update.adapter)
        await self._call("POST", "/load_lora_adapter", {"lora_name": update.adapter, "lora_path": update.folder})
        await self._unload(self._adapters - {update.adapter})
        await self._call("POST", "/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def _unload(self, adapters: set[str]) -> None:
        for name in sorted(adapters):
            try:
                await self._call("POST", "/unload_lora_adapter", {"lora_name": name})
            except EngineRejected as error:  # the server was started again meanwhile
                _log.info("%s has no adapter %s: %s", shown(self.url), name, error)
            self._adapters.discard(name)

    async def join_group(self, group: WeightGroup, rank: int) -> None:
        """Join a weight group; `rank` is the first of this engine's ranks."""
        place = {"master_address": group.address, "master_port": group.port, "rank_offset": rank}
        body = {**place, "world_size": group.world_size, "group_name": group.name, "backend": group.backend}
        await self._call("POST", "/init_weights_update_group", body)

    async def leave_group(self, name: str) -> None:
        """Leave a weight group."""
        await self._call("POST", "/destroy_weights_update_group", {"group_name": name})

    async def begin_update(self) -> None:
        """Open a weight-update session; tensors are accepted only inside a session. SGLang before 0.5.23 has no
        sessions: its first 404 is remembered, and no more calls are sent."""
        try:
            await self._update_session("/begin_weight_update")
        except EngineRejected:
            # A killed run may have left a session open at an external engine.
            await self._update_session("/end_weight_update")
            await self._update_session("/begin_weight_update")

    async def receive(self, bucket: Bucket, version: str) -> None:
        """Have the engine receive tensors that their group broadcasts as one flat buffer."""
        names, dtypes, shapes = ([spec[part] for spec in bucket.tensors] for part in range(3))
        tensors = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": bucket.group}
        await self._call("POST", "/update_weights_from_distributed", {**tensors, **_FLAT, "weight_version": version})

    async def receive_shared(self, handles: Sequence[str], version: str) -> None:
        """Have the engine read tensors from shared memory; one handle (`numerics.shared_handle`) for each device."""
        body = {"serialized_named_tensors": handles, **_FLAT, "weight_version": version}
        await self._call("POST", "/update_weights_from_tensor", body)

    async def end_update(self) -> None:
        """Close the weight-update session."""
        await self._update_session("/end_weight_update")

    async def _update_session(self, path: str) -> None:
        if not self._has_update_sessions:
            return
        try:
            await self._call("POST", path, {})
        except EngineRejected as error:
            if error.status != 404:
                raise
            self._has_update_sessions = False

    async def _object(self, path: str) -> dict[str, Any]:
        if not isinstance(answer := await self._call("GET", path), dict):
            raise self._not_sglang(f"{path} should answer a JSON object, got {answer!r:.120}")
        return answer

    def _not_sglang(self, said: str, status: int = 200) -> EngineRejected:
        return EngineRejected(f"{self.url} is no SGLang server: {said}", status=status, kind="not_sglang")

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            with anyio.fail_after(self._timeout):
                sent = None if body is None else orjson.dumps(body)
                headers = None if path in _OPEN else self._transport.control_headers
                status, raw, *_ = await self._exchange(method, self.url + path, sent, headers)
        except TimeoutError:
            said = f"{path} got no answer from {self.url} within {self._timeout:g} s (--engine-control-timeout)"
            raise EngineTimeout(said, kind="control_timeout") from None
        answer: Any = raw.decode(errors="replace") or None  # some control calls answer plain text or nothing
        with suppress(orjson.JSONDecodeError):
            answer = orjson.loads(raw)
        if status == 404 and path in ("/model_info", "/server_info"):
            raise self._not_sglang(f"it knows no {path}", status)
        if not 200 <= status < 300 or (isinstance(answer, dict) and answer.get("success") is False):
            said = f"{path} at {self.url} answered {status}: {error_message(raw, status)}"
            raise EngineRejected(said, status=status, kind="control_rejected")
        return answer
