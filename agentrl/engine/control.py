"""Control calls: health, pause, cache, weight updates. Each goes to every engine at once.

1. A call returns when every engine has answered with success, one answer an engine in the order of `urls`;
   otherwise it raises the first engine's error. A call that may block until a process group moves (init,
   broadcast) therefore has to run beside the trainer's side of it.
2. Every call is bounded by `engine_control_timeout`.
3. `begin_weight_update` and `end_weight_update` are sent only to servers that have them (SGLang from 0.5.23 on;
   found out by asking once), so the same update code drives old and new servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import anyio
import orjson

from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import Transport
from agentrl.engine.wire import error_message
from agentrl.errors import EngineFailure, EngineRejected, EngineTimeout, EngineUnreachable, SettingsError

PauseMode = Literal["abort", "in_place", "retract"]


class EngineControl:
    """The control plane of a fixed set of engines; an async context manager."""

    def __init__(self, urls: Sequence[str], settings: EngineSettings | None = None) -> None:
        """`urls`: one or more engines, as `host:port` or `http://host:port`."""
        if not urls:
            raise SettingsError("expected at least one engine address, got none; set --rollout-external-engine-addrs")
        self.settings = settings or EngineSettings()
        self.urls = tuple(normalise_url(url) for url in urls)
        self._transport = Transport(connect_timeout=self.settings.engine_connect_timeout)
        self._has_update_session: dict[str, bool] = {}

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._transport.__aexit__(*exc)

    # ---- asking -------------------------------------------------------------------------------------------

    async def health(self, timeout: float = 5.0) -> dict[str, bool]:
        """Which engines answer `/health` with 200 within `timeout` seconds, by address."""
        alive = dict.fromkeys(self.urls, False)

        async def ask(url: str) -> None:
            with anyio.move_on_after(timeout):
                try:
                    status, _ = await self._transport.exchange("GET", url + "/health")
                except EngineUnreachable:
                    return
                alive[url] = status == 200

        async with anyio.create_task_group() as group:
            for url in self.urls:
                group.start_soon(ask, url)
        return alive

    async def model_info(self) -> list[dict[str, Any]]:
        """`/model_info` of every engine: model_path, weight_version and more."""
        return await self._everywhere("GET", "/model_info")

    async def server_info(self) -> list[dict[str, Any]]:
        """`/server_info` of every engine: all server options and the version."""
        return await self._everywhere("GET", "/server_info")

    async def loads(self) -> list[dict[str, Any]]:
        """`/v1/loads` of every engine: running and waiting requests."""
        return await self._everywhere("GET", "/v1/loads?include=core")

    # ---- generation control -------------------------------------------------------------------------------

    async def abort_all(self) -> None:
        """End every request on every engine; each answers with what it has so far."""
        await self._everywhere("POST", "/abort_request", {"rid": "", "abort_all": True})

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generating. `abort` ends live requests, `in_place` freezes them, `retract` sends them back to the queue."""
        await self._everywhere("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on generating after `pause`, with the weights there are now."""
        await self._everywhere("POST", "/continue_generation", {})

    async def flush_cache(self, timeout: float = 60.0) -> None:
        """Drop all cached prefixes; waits up to `timeout` seconds for the engines to be idle."""
        await self._everywhere("POST", f"/flush_cache?timeout={timeout:g}")

    # ---- weights ------------------------------------------------------------------------------------------

    async def update_weights_from_disk(
        self, path: str, version: str | None = None, *, flush_cache: bool = True
    ) -> None:
        """Load a Hugging Face folder that every engine can read; an unpaused engine first finishes its requests."""
        body = {"model_path": str(path), "weight_version": version, "flush_cache": flush_cache}
        await self._everywhere("POST", "/update_weights_from_disk", body)

    async def init_weights_group(
        self,
        master_address: str,
        master_port: int,
        *,
        world_size: int,
        rank_offset: int = 1,
        ranks_per_engine: int = 1,
        group: str = "weight_update_group",
        backend: str = "nccl",
    ) -> None:
        """Join the process group that broadcasts weights: engine i takes ranks from `rank_offset + i * ranks_per_engine`.

        Returns when all `world_size` ranks have joined, the trainer's rank 0 included.
        """
        bodies = [
            {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": rank_offset + i * ranks_per_engine,
                "world_size": world_size,
                "group_name": group,
                "backend": backend,
            }
            for i in range(len(self.urls))
        ]
        await self._everywhere("POST", "/init_weights_update_group", bodies)

    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group: str = "weight_update_group",
        version: str | None = None,
        flush_cache: bool = True,
        load_format: str | None = None,
    ) -> None:
        """Receive tensors that rank 0 broadcasts in this order; returns when all are in.

        Args:
            names, dtypes, shapes: one each a tensor; Hugging Face names, dtypes as `bfloat16`.
        """
        if not len(names) == len(dtypes) == len(shapes):
            raise ValueError(f"expected one dtype and shape a name, got {len(names)}, {len(dtypes)}, {len(shapes)}")
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "flush_cache": flush_cache,
            "weight_version": version,
            "load_format": load_format,
        }
        await self._everywhere("POST", "/update_weights_from_distributed", body)

    async def destroy_weights_group(self, group: str = "weight_update_group") -> None:
        """Leave the process group."""
        await self._everywhere("POST", "/destroy_weights_update_group", {"group_name": group})

    async def begin_weight_update(self) -> None:
        """Open a weight-update session where the server has such a thing; tensors may come only inside it."""
        await self._each(self.urls, self._update_session, "/begin_weight_update")

    async def end_weight_update(self) -> None:
        """Close the weight-update session where the server has such a thing."""
        await self._each(self.urls, self._update_session, "/end_weight_update")

    async def set_weight_version(self, version: str) -> None:
        """Change the version label only; live requests go on."""
        await self._everywhere("POST", "/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def _update_session(self, url: str, path: str) -> None:
        if self._has_update_session.get(url) is False:
            return
        try:
            await self._call(url, "POST", path, {})
        except EngineRejected as error:
            if error.status != 404:
                raise
            self._has_update_session[url] = False
        else:
            self._has_update_session[url] = True

    # ---- sending ------------------------------------------------------------------------------------------

    async def _everywhere(
        self, method: str, path: str, body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    ) -> list[Any]:
        bodies = [body] * len(self.urls) if body is None or isinstance(body, Mapping) else list(body)
        jobs = dict(zip(self.urls, bodies, strict=True))

        async def one(url: str, _: str) -> Any:
            return await self._call(url, method, path, jobs[url])

        return await self._each(self.urls, one, path)

    async def _each(self, urls: Sequence[str], work: Any, path: str) -> list[Any]:
        answers: dict[str, Any] = {}
        failures: list[EngineFailure] = []

        async def run(url: str) -> None:
            try:
                answers[url] = await work(url, path)
            except EngineFailure as error:
                failures.append(error)

        async with anyio.create_task_group() as group:
            for url in urls:
                group.start_soon(run, url)
        if failures:
            raise failures[0]
        return [answers[url] for url in urls]

    async def _call(self, url: str, method: str, path: str, body: Any, timeout: float | None = None) -> Any:
        timeout = self.settings.engine_control_timeout if timeout is None else timeout
        try:
            with anyio.fail_after(timeout):
                status, raw = await self._transport.exchange(
                    method, url + path, None if body is None else orjson.dumps(body)
                )
        except TimeoutError:
            raise EngineTimeout(
                f"{path} got no answer from {url} within {timeout:g} s (--engine-control-timeout)",
                kind="control_timeout",
            ) from None
        if not 200 <= status < 300:
            raise EngineRejected(
                f"{path} at {url} answered {status}: {error_message(raw)}", status=status, kind="control_rejected"
            )
        answer = _loads(raw)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineRejected(
                f"{path} at {url} failed: {error_message(raw)}", status=status, kind="control_rejected"
            )
        return answer


def normalise_url(address: str) -> str:
    """`host:port` or a URL as a URL without a trailing slash."""
    url = address.strip().rstrip("/")
    return url if "://" in url else f"http://{url}"


def _loads(raw: bytes) -> Any:
    """Some control calls answer plain text or nothing: that is success too."""
    try:
        return orjson.loads(raw) if raw else None
    except orjson.JSONDecodeError:
        return raw.decode(errors="replace")
