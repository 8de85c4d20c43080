"""Pools in other processes that use a pool's engines: they pause for an update and resume with its weights."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest
from aiohttp import web

from agentrl.engine.health import EngineFollower
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.weights import DiskUpdate
from agentrl.engine.wire import Generation
from agentrl.errors import EngineUnreachable
from tests.engine.faults import FAST, PARAMS, FaultyServer, Reply, answer, ok, sent, serving, until


class Remote(EngineFollower):
    """The coordinator's end of a follower in this process."""

    def __init__(self, pool: EnginePool) -> None:
        self.pool, self.said = pool, list[str]()

    async def hold(self, *, idle: bool, version: str | None = None) -> None:
        self.said.append("idle" if idle else "hold")
        await self.pool.hold(idle=idle, version=version)

    async def release(self, version: str | None, folder: DiskUpdate | None) -> None:
        self.said.append(f"release {version}")
        self.pool.release(version, folder)


@asynccontextmanager
async def followed(
    *script: Reply, settings: EngineSettings = FAST, kind: type[Remote] = Remote
) -> AsyncIterator[tuple[FaultyServer, EnginePool, Remote]]:
    """Start a server with this script, its pool with weights of version 1, and a follower."""
    async with (
        serving(*script) as server,
        EnginePool([server.url], settings, vocab_size=512) as pool,
        EnginePool([server.url], settings, vocab_size=512, follows=True) as follower,
    ):
        remote = kind(follower)
        pool.followers = (remote,)
        await pool.receive(DiskUpdate("/weights/1"), "1")
        yield server, pool, remote


async def interrupted(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    """Answer with two tokens and the engine's abort for an update."""
    version = server.version
    await server.aborted.wait()
    finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return web.json_response(answer([10, 11], finish_reason=finish, prompt_tokens=1, weight_version=version))


async def test_a_followers_call_goes_on_over_an_update_with_tokens_of_both_versions() -> None:
    got: list[Generation] = []
    async with followed(interrupted, ok([12, 13])) as (server, pool, remote):
        follower = remote.pool

        async def call() -> None:
            got.append(await follower.generate([1], PARAMS))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await until(partial(sent, server, 1))
            await pool.receive(DiskUpdate("/weights/2"), "2")
            server.aborted.set()
        assert follower.version == "2"
    assert remote.said == ["hold", "release 1", "hold", "release 2"]
    assert [body["input_ids"] for body in server.generates] == [[1], [1, 10, 11]]
    assert got[0].ids == [10, 11, 12, 13]
    assert [version for version, _, _ in got[0].weight_versions] == ["1", "2"]


async def test_a_request_that_another_workers_pause_aborted_is_sent_again_and_is_no_failure() -> None:
    async def aborted(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        return web.json_response(answer([], finish_reason=finish, prompt_tokens=1, weight_version=server.version))

    async with followed(aborted, ok([5])) as (_, _, remote):
        await remote.release("1", None)
        assert (await remote.pool.generate([1], PARAMS)).ids == [5]
        assert remote.pool.figures()["engines/failed"] == 0


async def test_an_answer_of_the_new_weights_that_comes_before_a_follower_is_released_is_taken() -> None:
    resumed, got = anyio.Event(), list[Generation]()
    settings = FAST.model_copy(update={"pause_generation_mode": "retract"})

    class Late(Remote):
        async def release(self, version: str | None, folder: DiskUpdate | None) -> None:
            resumed.set()  # the engine continues
            if self.said.count("hold") > 1:
                await until(lambda: bool(got))
            await super().release(version, folder)

    async def of_both(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        await until(lambda: server.version == "2")
        await resumed.wait()
        spans = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 4}]
        return web.json_response(answer([10, 11, 12, 13], prompt_tokens=1, weight_version="2", weight_versions=spans))

    async with followed(of_both, ok([20]), settings=settings, kind=Late) as (server, pool, remote):
        follower = remote.pool

        async def call() -> None:
            got.append(await follower.generate([1], PARAMS))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await until(partial(sent, server, 1))
            resumed = anyio.Event()
            with anyio.fail_after(20):
                await pool.receive(DiskUpdate("/weights/2"), "2")
    assert (got[0].ids, got[0].weight_versions) == ([10, 11, 12, 13], (("1", 0, 2), ("2", 2, 4)))
    assert len(server.generates) == 1


async def test_an_engine_that_missed_an_update_gets_none_of_a_followers_requests_until_the_pool_has_repaired_it() -> (
    None
):
    async with serving(ok([10])) as server:
        often = FAST.model_copy(update={"engine_probe_interval": 0.1})
        async with EnginePool([server.url], often, vocab_size=512, follows=True) as follower:
            server.version = "1"
            follower.release("2", DiskUpdate("/weights/2"))
            got: list[Generation] = []

            async def call() -> None:
                got.append(await follower.generate([1], PARAMS))

            async with anyio.create_task_group() as group:
                group.start_soon(call)
                await until(lambda: follower.members[0].weights == "stale")
                probes = server.probes
                await until(lambda: server.probes > probes + 2)
                assert not got
                server.version = "2"  # as after a repair
            assert got
        assert {*server.paths} == {"POST /generate"}, "a follower repairs nothing"


async def test_offloaded_memory_pauses_followers_until_the_onload() -> None:
    async with (
        serving(ok([10])) as server,
        EnginePool([server.url], FAST, vocab_size=512) as pool,
        EnginePool([server.url], FAST, vocab_size=512, follows=True) as follower,
    ):
        server.info = {"enable_memory_saver": True, "startup_time": 1.0}
        remote = Remote(follower)
        pool.followers = (remote,)
        await pool.set_resident_memory(frozenset())
        assert follower.pause_gate.closed
        await pool.set_resident_memory(frozenset({"weights", "kv_cache"}))
        assert not follower.pause_gate.closed
    assert remote.said == ["idle", "idle", "release None"]


async def test_a_follower_opens_while_an_engine_is_away() -> None:
    async with serving(ok([10])) as server:
        server.info = {"model_type": "qwen3"}
        urls = [server.url, "http://127.0.0.1:9"]
        async with EnginePool(urls, FAST, vocab_size=512) as pool:
            with pytest.raises(EngineUnreachable):
                await pool.check()
        async with EnginePool(urls, FAST, vocab_size=512, follows=True) as follower:
            await follower.check()
            assert (await follower.server_info()).keys() == {server.url}
        async with EnginePool(urls[1:], FAST, vocab_size=512) as pool:
            with pytest.raises(EngineUnreachable):
                await pool.server_info()
