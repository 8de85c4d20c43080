"""The client against servers that go wrong on purpose (`faults`)."""

import socket

import anyio
import pytest

from agentrl.engine import EngineClient, EngineSettings, SamplingParams
from agentrl.engine.client import ROUTING_HEADER
from agentrl.errors import EngineRejected, EngineTimeout, EngineUnreachable
from agentrl.sample import Sample
from tests.engine.faults import ok, reset, serving, silence, status

FAST = EngineSettings(engine_retry_backoff=0.0, engine_max_retries=2)
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4)


@pytest.fixture
def closed_url() -> str:
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


async def test_a_good_answer_and_what_was_sent():
    async with serving(ok([5, 6])) as server, EngineClient([server.url], FAST) as client:
        got = await client.generate([1, 2, 3], PARAMS, session_id="s", options={"return_routed_experts": True})
    assert (got.ids, got.log_probs, got.weight_version) == ([5, 6], [-0.5, -0.5], "1")
    sent = server.generates[0]
    assert sent.pop("rid")
    assert sent == {
        "input_ids": [1, 2, 3],
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 4},
        "return_logprob": True,
        "return_routed_experts": True,
    }
    assert server.headers[0][ROUTING_HEADER] == "s"


async def test_refused_connection_is_engine_unreachable(closed_url: str):
    async with EngineClient([closed_url], FAST) as client:
        with pytest.raises(EngineUnreachable, match="after 3 attempts") as caught:
            await client.generate([1], PARAMS)
    assert caught.value.kind == "engine_refused"


async def test_a_dead_engine_hands_its_sessions_over(closed_url: str):
    async with serving(ok([5])) as server, EngineClient([closed_url, server.url], FAST) as client:
        for turn in range(3):
            assert (await client.generate([1], PARAMS, session_id=f"s{turn}")).ids == [5]
    assert len(server.generates) == 3


async def test_reset_mid_answer_is_retried_under_a_fresh_rid_and_counted_once():
    sample = Sample()
    sample.set_prompt_tokens([1, 2])
    async with serving(reset, ok([5, 6])) as server, EngineClient([server.url], FAST) as client:
        got = await client.generate(sample.tokens, PARAMS, rid="first")
        sample.append_model(got.ids, got.log_probs, got.weight_version)
    first, second = (body["rid"] for body in server.generates)
    assert first == "first"
    assert second != first
    assert server.aborts == ["first"]
    assert sample.tokens == [1, 2, 5, 6]


async def test_reset_for_ever_is_engine_unreachable():
    async with serving(reset) as server, EngineClient([server.url], FAST) as client:
        with pytest.raises(EngineUnreachable) as caught:
            await client.generate([1], PARAMS)
    assert caught.value.kind == "engine_lost"
    assert len(server.generates) == FAST.engine_max_retries + 1


@pytest.mark.parametrize("code", [429, 502, 503])
async def test_busy_answers_are_retried(code: int):
    async with serving(status(code), ok([5])) as server, EngineClient([server.url], FAST) as client:
        assert (await client.generate([1], PARAMS)).ids == [5]


@pytest.mark.parametrize("code", [400, 404, 500])
async def test_other_errors_are_raised_at_once_with_the_servers_words(code: int):
    async with serving(status(code), ok([5])) as server, EngineClient([server.url], FAST) as client:
        with pytest.raises(EngineRejected, match=f"{code}: no") as caught:
            await client.generate([1], PARAMS)
    assert caught.value.status == code
    assert len(server.generates) == 1


async def test_busy_for_ever_is_rejected():
    async with serving(status(503)) as server, EngineClient([server.url], FAST) as client:
        with pytest.raises(EngineRejected) as caught:
            await client.generate([1], PARAMS)
    assert caught.value.status == 503
    assert len(server.generates) == 3


async def test_overflow_has_its_own_kind():
    body = b'{"error":{"message":"The input (2100 tokens) is longer than the model\'s context length (2048 tokens)."}}'
    async with serving(status(400, body)) as server, EngineClient([server.url], FAST) as client:
        with pytest.raises(EngineRejected) as caught:
            await client.generate([1], PARAMS)
    assert caught.value.kind == "context_overflow"


@pytest.mark.parametrize("body", [b"{not json", b"[]", b'{"text": "x"}', b""])
async def test_a_malformed_answer_is_rejected_and_not_retried(body: bytes):
    async with serving(status(200, body)) as server, EngineClient([server.url], FAST) as client:
        with pytest.raises(EngineRejected, match="malformed engine answer") as caught:
            await client.generate([1], PARAMS)
    assert caught.value.kind == "malformed_answer"
    assert len(server.generates) == 1


async def test_a_slow_answer_is_a_timeout_and_is_aborted():
    async with serving(silence) as server, EngineClient([server.url], FAST) as client:
        with pytest.raises(EngineTimeout, match=r"0\.2 s"):
            await client.generate([1], PARAMS, rid="slow", deadline=0.2)
    assert server.aborts == ["slow"]


async def test_cancelling_sends_abort():
    async with serving(silence) as server, EngineClient([server.url], FAST) as client:
        async with anyio.create_task_group() as group:
            group.start_soon(client.generate, [1], PARAMS)
            await server.arrived.wait()
            group.cancel_scope.cancel()
        assert server.aborts == [server.generates[0]["rid"]]


async def test_abort_reaches_the_request_and_its_call_returns():
    async with serving(silence) as server, EngineClient([server.url], FAST) as client:
        got = []

        async def call() -> None:
            got.append(await client.generate([1], PARAMS, rid="mine"))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await server.arrived.wait()
            await client.abort("mine")
    assert server.aborts == ["mine"]
    assert got[0].ids == []


async def test_no_more_than_the_allowed_requests_are_in_flight():
    settings = EngineSettings(sglang_server_concurrency=2)
    async with (
        serving(silence) as server,
        EngineClient([server.url], settings) as client,
        anyio.create_task_group() as group,
    ):
        for _ in range(5):
            group.start_soon(client.generate, [1], PARAMS)
        await server.arrived.wait()
        await anyio.wait_all_tasks_blocked()
        assert len(server.generates) <= 2
        server.aborted.set()
    assert len(server.generates) == 5


@pytest.mark.parametrize("ids", [[], [1, 512], [-1], [1.5], [True]])
async def test_bad_prompts_are_refused_before_they_are_sent(ids: list):
    async with serving(ok([5])) as server, EngineClient([server.url], FAST, vocab_size=512) as client:
        with pytest.raises(EngineRejected) as caught:
            await client.generate(ids, PARAMS)
    assert caught.value.kind == "bad_prompt"
    assert server.generates == []


async def test_a_server_without_weight_sessions_is_left_alone():
    async with serving(ok([5])) as server, EngineClient([server.url], FAST) as client:
        await client.begin_weight_update()  # 404 here, as on servers before 0.5.23
        await client.end_weight_update()
        with pytest.raises(EngineRejected) as caught:
            await client.pause()
    assert caught.value.status == 404


async def test_health_names_the_dead(closed_url: str):
    async with serving(ok([5])) as server, EngineClient([closed_url, server.url], FAST) as client:
        assert await client.health(timeout=2.0) == {closed_url: False, server.url: False}
