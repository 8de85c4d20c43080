"""The pool against servers that go wrong on purpose (`faults`)."""

import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web

from agentrl.engine import DiskUpdate, EnginePool, EngineSettings, Generation, SamplingParams
from agentrl.engine.requests import ROUTING_HEADER
from agentrl.engine.transport import ConnectionRefused, HttpTransport, Reply
from agentrl.errors import EngineRejected, EngineTimeout, EngineUnreachable, SettingsError
from agentrl.sample import Sample
from tests.engine.faults import FaultyServer, answer, late, ok, reset, retry_after, serving, silence, status

FAST = EngineSettings(engine_retry_backoff=0.0, engine_max_retries=2, engine_absence_timeout=0.0)
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4)


async def until(condition: Callable[[], bool]) -> None:
    """Return once it holds."""
    with anyio.fail_after(5):
        while not condition():
            await anyio.lowlevel.checkpoint()


def sent(server: FaultyServer, number: int) -> bool:
    return len(server.generates) >= number


@pytest.fixture
def closed_url() -> str:
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


async def test_a_good_answer_and_what_was_sent() -> None:
    async with serving(ok([5, 6])) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        got = await pool.generate([1, 2, 3], PARAMS, session_id="s")
    assert (got.ids, got.log_probs, got.weight_version) == ([5, 6], [-0.5, -0.5], "1")
    sent = server.generates[0]
    assert sent.pop("rid")
    assert sent == {
        "input_ids": [1, 2, 3],
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 4},
        "return_logprob": True,
    }
    assert server.headers[0][ROUTING_HEADER] == "s"


async def test_refused_connection_is_engine_unreachable(closed_url: str) -> None:
    async with EnginePool([closed_url], FAST, vocab_size=512) as pool:
        with pytest.raises(EngineUnreachable, match="after 3 attempts") as caught:
            await pool.generate([1], PARAMS)
    assert caught.value.kind == "engine_refused"


async def test_a_dead_engine_hands_its_sessions_over(closed_url: str) -> None:
    async with serving(ok([5])) as server, EnginePool([closed_url, server.url], FAST, vocab_size=512) as pool:
        for turn in range(3):
            assert (await pool.generate([1], PARAMS, session_id=f"s{turn}")).ids == [5]
    assert len(server.generates) == 3


async def test_reset_mid_answer_is_retried_under_a_fresh_rid_and_counted_once() -> None:
    sample = Sample()
    sample.set_prompt_tokens([1, 2])
    async with serving(reset, ok([5, 6])) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        got = await pool.generate(sample.tokens, PARAMS, rid="first")
        sample.append_model(got.ids, got.log_probs, got.weight_version)
    first, second = (body["rid"] for body in server.generates)
    assert first == "first"
    assert second != first
    assert server.aborts == ["first"]
    assert sample.tokens == [1, 2, 5, 6]


async def test_reset_for_ever_is_engine_unreachable() -> None:
    async with serving(reset) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        with pytest.raises(EngineUnreachable) as caught:
            await pool.generate([1], PARAMS)
    assert caught.value.kind == "engine_lost"
    assert len(server.generates) == FAST.engine_max_retries + 1


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
async def test_failures_of_the_engine_are_retried(code: int) -> None:
    async with serving(status(code), ok([5])) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        assert (await pool.generate([1], PARAMS)).ids == [5]


@pytest.mark.parametrize("code", [400, 404])
async def test_other_errors_are_raised_at_once_with_the_servers_words(code: int) -> None:
    async with serving(status(code), ok([5])) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        with pytest.raises(EngineRejected, match=f"{code}: no") as caught:
            await pool.generate([1], PARAMS)
    assert caught.value.status == code
    assert len(server.generates) == 1


async def test_busy_for_ever_is_rejected() -> None:
    async with serving(status(503)) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        with pytest.raises(EngineRejected) as caught:
            await pool.generate([1], PARAMS)
    assert caught.value.status == 503
    assert len(server.generates) == 3


async def test_overflow_has_its_own_kind() -> None:
    body = b'{"error":{"message":"The input (2100 tokens) is longer than the model\'s context length (2048 tokens)."}}'
    async with serving(status(400, body)) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        with pytest.raises(EngineRejected) as caught:
            await pool.generate([1], PARAMS)
    assert caught.value.kind == "context_overflow"


@pytest.mark.parametrize("body", [b"{not json", b"[]", b'{"text": "x"}', b""])
async def test_a_malformed_answer_is_tried_elsewhere_and_rejected_in_the_end(body: bytes) -> None:
    async with serving(status(200, body)) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        with pytest.raises(EngineRejected, match="malformed engine answer") as caught:
            await pool.generate([1], PARAMS)
    assert caught.value.kind == "malformed_answer"
    assert len({body["rid"] for body in server.generates}) == 3


@pytest.mark.parametrize(("ids", "said"), [([512], "ids from 0 to 511"), ([5] * 5, "at most 4 tokens")])
async def test_an_answer_must_fit_the_request_and_the_model(ids: list[int], said: str) -> None:
    async with serving(ok(ids)) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        with pytest.raises(EngineRejected, match=rf"{said}.* \(from {server.url}\)"):
            await pool.generate([1], PARAMS)


async def test_a_slow_answer_is_a_timeout_and_is_aborted() -> None:
    async with serving(silence) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        with pytest.raises(EngineTimeout, match=r"0\.2 s"):
            await pool.generate([1], PARAMS, rid="slow", deadline=0.2)
    assert server.aborts == ["slow"]


async def test_cancelling_sends_abort() -> None:
    async with serving(silence) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        async with anyio.create_task_group() as group:
            group.start_soon(pool.generate, [1], PARAMS)
            await server.arrived.wait()
            group.cancel_scope.cancel()
        assert server.aborts == [server.generates[0]["rid"]]


async def test_abort_reaches_the_request_and_its_call_returns() -> None:
    async with serving(silence) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        got = []

        async def call() -> None:
            got.append(await pool.generate([1], PARAMS, rid="mine"))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await server.arrived.wait()
            await pool.abort("mine")
    assert server.aborts == ["mine"]
    assert got[0].ids == []


async def test_no_more_than_the_allowed_requests_are_in_flight() -> None:
    settings = EngineSettings(sglang_server_concurrency=2)
    async with (
        serving(late) as server,
        EnginePool([server.url], settings, vocab_size=512) as pool,
        anyio.create_task_group() as group,
    ):
        for _ in range(5):
            group.start_soon(pool.generate, [1], PARAMS)
        await server.arrived.wait()
        await anyio.wait_all_tasks_blocked()
        assert len(server.generates) <= 2
        server.aborted.set()
    assert len(server.generates) == 5


@pytest.mark.parametrize("ids", [[], [1, 512], [-1], [1.5], [True]])
async def test_bad_prompts_are_refused_before_they_are_sent(ids: list[Any]) -> None:
    async with serving(ok([5])) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        with pytest.raises(EngineRejected) as caught:
            await pool.generate(ids, PARAMS)
    assert caught.value.kind == "bad_prompt"
    assert server.generates == []


# ---- several engines ---------------------------------------------------------------------------------------------


async def test_a_sessions_next_turn_goes_elsewhere_when_its_engine_fails() -> None:
    async with (
        serving(ok([5]), status(503)) as one,
        serving(ok([6]), status(503)) as two,
        EnginePool([one.url, two.url], FAST, vocab_size=512) as pool,
    ):
        first = await pool.generate([1], PARAMS, session_id="s")
        second = await pool.generate([1], PARAMS, session_id="s")
    assert {first.ids[0], second.ids[0]} == {5, 6}
    assert len({body["rid"] for body in [*one.generates, *two.generates]}) == 3


@pytest.mark.parametrize("count", [2, 4, 8])
async def test_one_engine_that_fails_at_once_costs_no_trajectory(count: int) -> None:
    settings = EngineSettings(engine_retry_backoff=0.0)
    failed = 0
    async with AsyncExitStack() as stack:
        sick = await stack.enter_async_context(serving(status(500)))
        well = [await stack.enter_async_context(serving(slow)) for _ in range(count - 1)]
        pool = await stack.enter_async_context(
            EnginePool([sick.url, *(server.url for server in well)], settings, vocab_size=512)
        )
        places = anyio.Semaphore(64)

        async def play(number: int) -> None:
            nonlocal failed
            async with places:
                try:
                    await pool.generate([1, 2, 3], PARAMS, session_id=f"s{number}")
                except EngineRejected:
                    failed += 1

        async with anyio.create_task_group() as group:
            for number in range(1000):
                group.start_soon(play, number)
    assert failed == 0
    assert sum(len(server.generates) for server in well) == 1000
    assert len(sick.generates) <= 64 / count + 10, "after the first failure it gets one request a rest"


async def slow(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    await anyio.sleep(0.005)
    return await ok([5])(server, body, request)


async def test_an_engine_is_left_alone_as_long_as_it_says() -> None:
    async with (
        serving(retry_after(3600), ok([6])) as busy,
        serving(ok([5])) as well,
        EnginePool([busy.url, well.url], FAST, vocab_size=512) as pool,
    ):
        assert [(await pool.generate([1], PARAMS)).ids for _ in range(4)] == [[5]] * 4
        assert len(busy.generates) == 1
        rests = pool.members[0].state.rests_until - anyio.current_time()
    assert 3000 < rests <= 3600


async def test_requests_of_an_engine_that_hangs_go_elsewhere() -> None:
    settings = FAST.model_copy(update={"engine_probe_interval": 0.02})
    async with (
        serving(silence) as hung,
        serving(ok([5])) as well,
        EnginePool([hung.url, well.url], settings, vocab_size=512) as pool,
    ):
        got = []

        async def call() -> None:
            got.append(await pool.generate([1], PARAMS, session_id="s"))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await hung.arrived.wait()
            hung.deaf = True
        assert got[0].ids == [5]
        assert pool.members[0].state.weights == "unknown"
        hung.deaf = False
        await until(lambda: pool.members[0].state.weights == "current")
    assert hung.aborts == [], "nobody waits for an engine that does not answer"


# ---- members come and go -----------------------------------------------------------------------------------------


async def test_an_engine_with_other_weights_is_noticed_and_given_the_current_ones(tmp_path: Path) -> None:
    settings = FAST.model_copy(update={"engine_probe_interval": 0.02})
    async with (
        serving(ok([5])) as server,
        EnginePool([server.url], settings, vocab_size=512) as pool,
    ):
        await pool.receive(DiskUpdate(str(tmp_path)), "7")
        assert (await pool.generate([1], PARAMS)).weight_version == "7"
        server.version = "default"  # started again, and nobody noticed
        assert (await pool.generate([1], PARAMS)).weight_version == "7"
    assert server.loaded == [str(tmp_path)] * 2


async def test_weights_that_were_broadcast_cannot_be_given_again() -> None:
    async with serving(ok([5])) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        pool._roster.sent("7", None, pool.members)
        with pytest.raises(EngineUnreachable, match="--update-weight-mode disk") as caught:
            await pool.generate([1], PARAMS)
    assert caught.value.kind == "no_current_weights"


async def test_engines_join_with_the_current_weights_and_leave(tmp_path: Path) -> None:
    async with serving(ok([5])) as one, serving(ok([6])) as two, EnginePool([one.url], FAST, vocab_size=512) as pool:
        await pool.receive(DiskUpdate(str(tmp_path)), "7")
        await pool.join(two.url)
        assert two.loaded == [str(tmp_path)]
        assert {(await pool.generate([1], PARAMS)).ids[0] for _ in range(4)} == {5, 6}
        pool.leave(one.url)
        assert {(await pool.generate([1], PARAMS)).ids[0] for _ in range(4)} == {6}
        with pytest.raises(SettingsError, match="no engine of this pool"):
            pool.leave(one.url)
        with pytest.raises(SettingsError, match="member of this pool already"):
            await pool.join(two.url)


async def test_engines_that_serve_something_else_are_named(tmp_path: Path) -> None:
    for name, size in (("a", 10), ("b", 12)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"vocab_size": {size}}}')
    async with serving(ok([5])) as one, serving(ok([6])) as two:
        one.info = two.info = {"model_type": "qwen3", "model_path": str(tmp_path / "a")}
        async with EnginePool([one.url, two.url], FAST, vocab_size=512) as pool:
            await pool.check()
            for changed, said in ({"model_type": "llama"}, "'llama'"), ({"model_path": str(tmp_path / "b")}, "12"):
                two.info = one.info | changed
                with pytest.raises(EngineRejected, match=said) as caught:
                    await pool.check()
                assert caught.value.kind == "other_model"


async def test_an_address_that_is_no_sglang_server_is_named() -> None:
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with EnginePool([f"127.0.0.1:{runner.addresses[0][1]}"], FAST, vocab_size=512) as pool:
        with pytest.raises(EngineRejected, match="is no SGLang server") as caught:
            await pool.check()
    await runner.cleanup()
    assert caught.value.kind == "not_sglang"


# ---- interruptions -----------------------------------------------------------------------------------------------


class Sampler:
    """A reply that samples 10, 11, ... until it is aborted or `limit` ids after the prompt [1] are there."""

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


async def test_a_held_call_goes_on_with_its_tokens_and_its_time_stands_still() -> None:
    got: list[Generation] = []
    params = SamplingParams(max_new_tokens=8)
    async with serving(Sampler(8)) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:

        async def call() -> None:
            got.append(await pool.generate([1], params, session_id="s", deadline=0.5))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            for number in (1, 2):
                await until(partial(sent, server, number))
                await pool.hold()
                assert not got
                await anyio.sleep(0.6)
                assert len(server.generates) == number, "nothing is sent while it is held"
                await pool.release()
    assert got[0].ids == list(range(10, 18))
    assert got[0].finish_reason.type == "length"
    assert got[0].prompt_tokens == 1
    assert [body["input_ids"] for body in server.generates] == [[1], [1, 10, 11], [1, 10, 11, 12, 13]]
    assert len({body["rid"] for body in server.generates}) == 3


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
        pool.held.close()
        async with anyio.create_task_group() as group:
            group.start_soon(call, "held")
            await anyio.wait_all_tasks_blocked()
            await pool.abort("held")
    assert [body["rid"] for body in server.generates] == ["first"]
    assert [(got[name].ids, got[name].finish_reason.type) for name in ("queued", "held")] == [([], "abort")] * 2


async def test_a_call_in_a_back_off_can_be_aborted() -> None:
    settings = FAST.model_copy(update={"engine_retry_backoff": 1000.0})
    async with serving(status(503)) as server, EnginePool([server.url], settings, vocab_size=512) as pool:
        got: list[Generation] = []

        async def call() -> None:
            got.append(await pool.generate([1], PARAMS, rid="mine"))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await server.arrived.wait()
            await until(lambda: pool.members[0].state.failures > 0)
            await pool.abort("mine")
    assert got[0].finish_reason.type == "abort"
    assert len(server.generates) == 1


@pytest.mark.parametrize(("ignore_eos", "ids"), [(None, [5, 99]), (True, [5, 99, 7])])
async def test_a_call_that_is_interrupted_behind_its_stop_token_has_ended(
    ignore_eos: bool | None, ids: list[int]
) -> None:
    """SGLang says abort, and not stop, of a request whose abort it heeds in the step of its stop token."""

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
            await pool.hold()
            await pool.release()
    assert got[0].ids == ids
    assert (got[0].finish_reason.type, got[0].finish_reason.matched) == (
        ("length", None) if ignore_eos else ("stop", 99)
    )


# ---- nobody is there ---------------------------------------------------------------------------------------------


class Refusing(HttpTransport):
    """Refuses every connection so many times after the first request has been lost."""

    def __init__(self) -> None:
        super().__init__(connect_timeout=1.0)
        self.down, self.refused = False, 0

    async def exchange(
        self, method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        if self.down and url.endswith("/generate"):
            self.refused += 1
            self.down = self.refused < 8
        if self.down:
            raise ConnectionRefused("refused", kind="engine_refused")
        return await super().exchange(method, url, body, headers)


async def test_patience_for_an_engine_that_is_gone_counts_from_when_it_went() -> None:
    settings = EngineSettings(
        engine_absence_timeout=0.4, engine_retry_backoff=0.0, engine_max_retries=3, engine_probe_interval=1000.0
    )

    async def dies(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        await anyio.sleep(0.5)  # longer than the patience
        transport.down = True
        return await reset(server, body, request)

    async with (
        serving(dies, ok([5])) as server,
        Refusing() as transport,
        EnginePool([server.url], settings, vocab_size=512, transport=transport) as pool,
    ):
        assert (await pool.generate([1], PARAMS)).ids == [5]
    assert transport.refused == 8


async def test_a_hung_engine_is_broken_off_also_when_it_was_lost_before() -> None:
    settings = FAST.model_copy(update={"engine_probe_interval": 0.02, "engine_max_retries": 0})
    async with serving(silence) as hung, EnginePool([hung.url], settings, vocab_size=512) as pool:
        hung.deaf = True
        await until(lambda: pool.members[0].state.weights == "unknown")
        with pytest.raises(EngineUnreachable, match="does not answer any more"):
            await pool.generate([1], PARAMS, deadline=5.0)


# ---- members that are brought back -------------------------------------------------------------------------------


async def test_an_engine_that_hangs_as_it_is_brought_back_keeps_nobody_waiting(tmp_path: Path) -> None:
    settings = FAST.model_copy(update={"engine_probe_interval": 0.05})
    async with (
        serving(ok([5])) as hangs,
        serving(ok([6])) as well,
        EnginePool([hangs.url, well.url], settings, vocab_size=512) as pool,
    ):
        await pool.receive(DiskUpdate("first"), "1")
        hangs.load_gate = gate = anyio.Event()
        hangs.version = "other"
        pool._roster.strayed(pool.members[0])
        await until(lambda: len(hangs.loaded) == 2)
        for _ in range(3):
            pool._roster.lost(pool.members[1])
            await until(lambda: pool.members[1].state.weights == "current")
        assert len(hangs.loaded) == 2, "it is not asked again while it loads"
        hangs.load_gate = None
        with anyio.fail_after(5):
            await pool.receive(DiskUpdate("second"), "2")
        assert [member.state.weights for member in pool.members] == ["current"] * 2
        assert not pool.members[0]._calls, "nobody brings it back to the weights before"
        gate.set()


async def test_why_an_engine_cannot_be_brought_back_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    settings = FAST.model_copy(update={"engine_probe_interval": 0.01})
    async with serving(ok([5])) as server, EnginePool([server.url], settings, vocab_size=512) as pool:
        await pool.receive(DiskUpdate("first"), "1")
        server.load_status, server.version = 400, "other"
        with caplog.at_level(logging.WARNING):
            pool._roster.strayed(pool.members[0])
            await until(lambda: len(server.loaded) == 5)
            assert caplog.text.count("answered 400") == 1
            server.load_status = 409
            await until(lambda: len(server.loaded) == 8)
    assert caplog.text.count("answered 409") == 1


async def test_sessions_of_an_engine_that_leaves_while_it_is_updated_go_elsewhere() -> None:
    async with serving(ok([5])) as leaves, EnginePool([leaves.url], FAST, vocab_size=512) as pool:
        await pool.generate([1], PARAMS, session_id="s")
        left = pool.members[0]
        async with serving(ok([6])) as stays:
            await pool.join(stays.url)
            pool.leave(leaves.url)
            pool._roster.sent("1", None, (left, *pool.members))  # it took them, and then it was gone
            assert (await pool.generate([1], PARAMS, session_id="s", deadline=5.0)).ids == [6]
        assert left.state.in_flight == 0
