"""Calls of a pool that a pause, an update or an abort interrupts: they continue with their tokens, or end with them."""

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web

from agentrl.engine import requests
from agentrl.engine.pool import EnginePool
from agentrl.engine.weights import DiskUpdate
from agentrl.engine.wire import Generation, SamplingParams
from agentrl.errors import EngineRejected
from tests.engine.faults import FAST, PARAMS, FaultyServer, answer, late, ok, sent, serving, status, until


class Sampler:
    """A reply that samples 10, 11, ... until it is aborted or `limit` ids after the prompt [1] exist."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    async def __call__(self, server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        done = len(body["input_ids"]) - 1
        assert body["sampling_params"]["max_new_tokens"] == self.limit - done
        if done >= 4:
            ids = list(range(10 + done, 10 + self.limit))
            return web.json_response(answer(ids, prompt_tokens=1 + done, weight_version=server.version))
        await server.aborted.wait()
        server.aborted = anyio.Event()
        finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        return web.json_response(
            answer([10 + done, 11 + done], finish_reason=finish, prompt_tokens=1 + done, weight_version=server.version)
        )


async def test_a_paused_call_continues_with_its_tokens_and_its_deadline_pauses() -> None:
    got: list[Generation] = []
    params = SamplingParams(max_new_tokens=8)
    async with serving(Sampler(8)) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:

        async def call() -> None:
            got.append(await pool.generate([1], params, session_id="s", deadline=0.5))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            for number in (1, 2):
                await until(partial(sent, server, number))
                await pool.pause()
                assert not got
                await anyio.sleep(0.6)
                assert len(server.generates) == number, "nothing is sent while it is held"
                await pool.resume()
    assert got[0].ids == list(range(10, 18))
    assert got[0].finish_reason.type == "length"
    assert got[0].prompt_tokens == 1
    assert [body["input_ids"] for body in server.generates] == [[1], [1, 10, 11], [1, 10, 11, 12, 13]]
    assert len({body["rid"] for body in server.generates}) == 3


async def test_a_call_that_works_on_during_an_update_has_tokens_of_both_versions() -> None:
    spans = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 4}]
    updated = anyio.Event()

    async def reply(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.Response:
        await updated.wait()
        return web.json_response(answer([10, 11, 12, 13], prompt_tokens=1, weight_version="2", weight_versions=spans))

    got: list[Generation] = []
    settings = FAST.model_copy(update={"pause_generation_mode": "in_place"})
    async with serving(reply) as server, EnginePool([server.url], settings, vocab_size=512) as pool:
        await pool.receive(DiskUpdate("/weights/1"), "1")

        async def call() -> None:
            got.append(await pool.generate([1], PARAMS))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await until(partial(sent, server, 1))
            await pool.receive(DiskUpdate("/weights/2"), "2")
            updated.set()
    assert got[0].weight_versions == (("1", 0, 2), ("2", 2, 4))
    assert len(server.generates) == 1, "nothing was sampled again"
    assert server.loaded == ["/weights/1", "/weights/2"]


async def test_an_interrupted_answer_with_a_grammar_begins_again() -> None:
    class Whole(Sampler):
        async def __call__(
            self, server: FaultyServer, body: dict[str, Any], request: web.Request
        ) -> web.StreamResponse:
            if len(server.generates) > 1:
                return web.json_response(answer(list(range(10, 18)), prompt_tokens=1, weight_version=server.version))
            return await super().__call__(server, body, request)

    got: list[Generation] = []
    params = SamplingParams(max_new_tokens=8, regex="a+")
    async with serving(Whole(8)) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:

        async def call() -> None:
            got.append(await pool.generate([1], params))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await until(partial(sent, server, 1))
            await pool.pause()
            await pool.resume()
    assert [body["input_ids"] for body in server.generates] == [[1], [1]]
    assert got[0].ids == list(range(10, 18))


@pytest.mark.parametrize("read", [None, [[None, 1, None]]])
async def test_log_probs_that_an_update_interrupts_are_computed_again(read: list[Any] | None, tmp_path: Path) -> None:
    """An engine reports no log-probs of a prompt that it has not read, or the first token's place only."""

    async def interrupted(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        await until(lambda: server.version == "7")
        scored = {} if read is None else {"input_token_logprobs": read}
        return web.json_response(answer([], finish_reason={"type": "abort"}, weight_version="1", **scored))

    found = [[None, 1, None], [-1.0, 2, None], [-2.0, 3, None]]
    scored = ok([], input_token_logprobs=found)
    async with serving(interrupted, scored) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        await pool.receive(DiskUpdate(str(tmp_path)), "1")
        got: list[list[float]] = []

        async def score() -> None:
            got.append(await pool.log_probs([1, 2, 3], 2))

        async with anyio.create_task_group() as group:
            group.start_soon(score)
            await server.arrived.wait()
            await pool.receive(DiskUpdate(str(tmp_path)), "7")
        assert got == [[-1.0, -2.0]]
        assert pool.figures()["engines/failed"] == 0


async def test_an_engine_that_aborts_again_and_again_is_a_failure() -> None:
    async def refuse(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        return web.json_response(answer([], finish_reason=finish, prompt_tokens=1))

    async with serving(refuse) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        with pytest.raises(
            EngineRejected, match=r"aborted the request before its first token.*after 3 attempts"
        ) as caught:
            await pool.generate([1], PARAMS)
    assert caught.value.kind == "aborted"


async def test_a_call_that_waits_for_a_place_or_is_held_can_be_aborted() -> None:
    settings = FAST.model_copy(update={"sglang_server_concurrency": 1})
    got: dict[str, Generation] = {}
    async with serving(late) as server, EnginePool([server.url], settings, vocab_size=512) as pool:

        async def call(name: str) -> None:
            got[name] = await pool.generate([1], PARAMS, rid=name)

        async with anyio.create_task_group() as group:
            group.start_soon(call, "first")
            await server.arrived.wait()
            group.start_soon(call, "queued")
            await anyio.wait_all_tasks_blocked()
            await pool.abort("queued")
            server.aborted.set()
        pool.pause_gate.close()
        async with anyio.create_task_group() as group:
            group.start_soon(call, "held")
            await anyio.wait_all_tasks_blocked()
            await pool.abort("held")
    assert len(server.generates) == 1
    assert [(got[name].ids, got[name].finish_reason.type) for name in ("queued", "held")] == [([], "abort")] * 2


async def test_an_abort_of_an_unknown_call_does_nothing() -> None:
    async with EnginePool(["http://127.0.0.1:1"], FAST, vocab_size=512) as pool:
        await pool.abort("ended")
        assert pool.members[0].weights == "current"


async def test_a_call_in_a_back_off_can_be_aborted() -> None:
    settings = FAST.model_copy(update={"engine_retry_backoff": 1000.0})
    async with serving(status(503)) as server, EnginePool([server.url], settings, vocab_size=512) as pool:
        got: list[Generation] = []

        async def call() -> None:
            got.append(await pool.generate([1], PARAMS, rid="mine"))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await server.arrived.wait()
            await until(lambda: pool.members[0].failures > 0)
            await pool.abort("mine")
    assert got[0].finish_reason.type == "abort"
    assert len(server.generates) == 1


async def test_an_abort_is_repeated_if_its_request_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is still reading a request does not know the request yet."""
    monkeypatch.setattr(requests, "_ABORT_AGAIN", 0.0)
    read = anyio.Event()

    async def reading(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        await read.wait()
        return await ok([5])(server, body, request)

    async with (
        serving(reading) as server,
        EnginePool([server.url], FAST, vocab_size=512) as pool,
        anyio.create_task_group() as group,
    ):
        group.start_soon(partial(pool.generate, [1], PARAMS, rid="mine"))
        await server.arrived.wait()
        await pool.abort("mine")
        assert server.aborts == [server.generates[0]["rid"]] * 3
        read.set()


@pytest.mark.parametrize(("ignore_eos", "ids"), [(None, [5, 99]), (True, [5, 99, 7])])
async def test_a_call_that_is_interrupted_behind_its_stop_token_has_ended(
    ignore_eos: bool | None, ids: list[int]
) -> None:
    """SGLang says abort, not stop, if it handles the abort in the step of the request's stop token."""

    async def ends(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        await server.aborted.wait()
        finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        return web.json_response(answer([5, 99], finish_reason=finish, prompt_tokens=1))

    got: list[Generation] = []
    params = SamplingParams(max_new_tokens=3, stop_token_ids=(99,), ignore_eos=ignore_eos)
    async with serving(ends, ok([7])) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:

        async def call() -> None:
            got.append(await pool.generate([1], params))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await server.arrived.wait()
            await pool.pause()
            await pool.resume()
    assert got[0].ids == ids
    assert (got[0].finish_reason.type, got[0].finish_reason.matched) == (
        ("length", None) if ignore_eos else ("stop", 99)
    )
