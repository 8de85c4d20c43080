"""The pool with servers that have deliberate faults (`faults`)."""

import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import anyio
import orjson
import pytest
from aiohttp import web

from agentrl.engine import requests
from agentrl.engine.pool import EnginePool
from agentrl.engine.requests import ROUTING_HEADER
from agentrl.engine.settings import EngineSettings
from agentrl.errors import EngineRejected, EngineTimeout, EngineUnreachable
from agentrl.sample import Sample
from tests.engine.faults import (
    FAST,
    PARAMS,
    FaultyServer,
    Reply,
    answer,
    late,
    ok,
    reset,
    retry_after,
    serving,
    silence,
    status,
    until,
)
from tests.support.nightly import nightly


@pytest.fixture
def closed_url() -> Iterator[str]:
    """Return an address on which no program listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


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


async def test_kept_sets_are_asked_for_and_their_absence_is_no_engines_fault() -> None:
    params = replace(PARAMS, top_p=0.9, return_sampling_mask=True)
    async with serving(ok([5, 6])) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        with pytest.raises(EngineRejected, match="return_sampling_mask, SGLang from 0.5.23") as caught:
            await pool.generate([1, 2, 3], params)
    assert caught.value.kind == "no_sampling_mask"
    (sent,) = server.generates
    assert sent["return_sampling_mask"] is True
    assert "return_sampling_mask" not in sent["sampling_params"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"temperature": 0.5, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "logit_bias": {}}, ""),
        ({"temperature": 0.7}, "temperature 0.7"),
        ({"logit_bias": {"5": 5.0}}, "logit_bias {'5': 5.0}"),
        ({"presence_penalty": 0.5, "regex": "a+"}, "regex 'a+', presence_penalty 0.5"),
    ],
)
async def test_sampling_that_training_cannot_compute_is_counted_and_told_once(
    caplog: pytest.LogCaptureFixture, changes: dict[str, Any], said: str
) -> None:
    params = replace(PARAMS, **{"temperature": 1.0, **changes})
    async with (
        serving(ok([5])) as server,
        EnginePool([server.url], FAST, vocab_size=512, temperatures=[1.0, 0.5]) as pool,
    ):
        for _ in range(2):
            await pool.generate([1, 2, 3], params)
        figures = pool.figures()
    told = [record.getMessage() for record in caplog.records if "samples with" in record.getMessage()]
    assert figures["engines/sampled_otherwise"] == (2 if said else 0)
    assert len(told) == bool(said)
    assert all(f"samples with {said}, unlike the run (temperature 1):" in line for line in told)


async def test_figures_are_of_what_happened_since_the_last_ones(closed_url: str) -> None:
    drafts = {"spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 4, "spec_verify_ct": 2, "cached_tokens": 2}
    async with serving(ok([5], **drafts)) as server, EnginePool([server.url, closed_url], FAST, vocab_size=512) as pool:
        got = [await pool.generate([1, 2, 3, 4], PARAMS) for _ in range(2)]
        first, second = pool.figures(), pool.figures()
    assert (first["engines/prefix_cache_hit_rate"], first["engines/ready"]) == (0.5, 1)
    assert first["engines/lost"] == 1 <= first["engines/failed"]
    assert 0 < first["engines/in_flight"] <= 1
    assert {**second, "engines/ready": 1} == {name: float(name == "engines/ready") for name in first}
    spent = Sample().spec_info
    spent.add(got[0].meta_info)
    assert (spent.spec_accept_token_num, spent.spec_draft_token_num, spent.spec_verify_ct) == (3, 4, 2)


async def test_the_mean_in_flight_counts_the_time_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    async def ten_seconds(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        nonlocal now
        now += 10
        return await ok([5])(server, body, request)

    async with serving(ten_seconds) as server:
        monkeypatch.setattr(requests, "time", SimpleNamespace(monotonic=lambda: now))
        async with EnginePool([server.url], FAST, vocab_size=512) as pool:
            now += 30  # idle
            await pool.generate([1, 2, 3], PARAMS)
            assert pool.figures()["engines/in_flight"] == 0.25
            now += 5
            assert pool.figures()["engines/in_flight"] == 0


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
    assert len({"first", first, second}) == 3
    assert server.aborts == [first]
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


@pytest.mark.parametrize(
    "said",
    [
        "The input (2100 tokens) is longer than the model's context length (2048 tokens).",
        "Input length (2046 tokens) exceeds the maximum allowed length (2042 tokens). Use a shorter input.",
    ],
)
async def test_overflow_has_its_own_kind(said: str) -> None:
    body = orjson.dumps({"error": {"message": said}})
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


@pytest.mark.parametrize(("ids", "said"), [([512], "sampled token 512"), ([5] * 5, "at most 4 tokens")])
async def test_an_answer_must_fit_the_request_and_the_model(ids: list[int], said: str) -> None:
    async with serving(ok(ids)) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        with pytest.raises(EngineRejected, match=rf"{said}.* \(from {server.url}\)"):
            await pool.generate([1], PARAMS)


async def test_log_probs_that_an_engine_gets_wrong_are_asked_of_another() -> None:
    def scores(*log_probs: float | None) -> Reply:
        async def reply(_: FaultyServer, body: dict[str, Any], request: web.Request) -> web.Response:
            ids = body["input_ids"][body["logprob_start_len"] :]
            found = [[p, i, None] for p, i in zip((None, *log_probs), ids, strict=True)]
            return web.json_response(answer([], input_token_logprobs=found, prompt_tokens=len(body["input_ids"])))

        return reply

    async with (
        serving(scores(-1.0, None)) as bad,
        serving(scores(-1.0, -2.0)) as good,
        EnginePool([bad.url, good.url], FAST, vocab_size=None) as pool,
    ):
        for _ in range(2):
            assert await pool.log_probs([4, 5, 6], 2) == [-1.0, -2.0]
    assert bad.generates[0]["logprob_start_len"] == 0
    assert bad.generates[0]["sampling_params"] == {"temperature": 1.0, "max_new_tokens": 0}


@pytest.mark.parametrize("count", [0, 3])
async def test_log_probs_need_a_token_before_them(count: int) -> None:
    async with EnginePool(["http://nowhere"], FAST, vocab_size=None) as pool:
        with pytest.raises(ValueError, match="expected at least 1, and another token before"):
            await pool.log_probs([4, 5, 6], count)


async def test_a_slow_answer_is_a_timeout_and_is_aborted() -> None:
    async with serving(silence) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        with pytest.raises(EngineTimeout, match=r"0\.2 s"):
            await pool.generate([1], PARAMS, rid="slow", deadline=0.2)
    assert server.aborts == [server.generates[0]["rid"]]


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
    # An engine aborts all ids that begin with the aborted id, so callers' names are not sent.
    assert set(server.aborts) == {server.generates[0]["rid"]} != {"mine"}
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


@pytest.mark.parametrize("count", nightly([2, 4, 8], 1))
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
        rests = pool.members[0].rests_until - anyio.current_time()
    assert 3000 < rests <= 3600


async def test_requests_of_an_engine_that_hangs_go_elsewhere() -> None:
    settings = FAST.model_copy(update={"engine_probe_interval": 0.1})
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
        assert pool.members[0].weights == "unknown"
        hung.deaf = False
        await until(lambda: pool.members[0].weights == "current")
    assert hung.aborts == [], "nobody waits for an engine that does not answer"


async def test_a_token_between_tokenizer_and_embedding_is_named_once_and_not_retried() -> None:
    async with serving(ok([490])) as server, EnginePool([server.url], FAST, vocab_size=482) as pool:
        with pytest.raises(EngineRejected, match=r"token 490.*482 ids.*config\.json") as caught:
            await pool.generate([1], PARAMS)
    assert (caught.value.kind, caught.value.status) == ("unknown_token", 502)
    assert len(server.generates) == 1
