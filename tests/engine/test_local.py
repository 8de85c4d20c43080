"""The built-in engine inside this process: the same answers as from a server, and no changes to the process."""

import signal
from functools import partial
from pathlib import Path

import anyio
import orjson
import pytest
import torch

from agentrl.engine.embedded.core import Engine
from agentrl.engine.local import in_process
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import HttpTransport
from agentrl.engine.weights import DiskUpdate
from agentrl.engine.wire import Generation, SamplingParams
from agentrl.errors import EngineFailure
from tests.engine.conftest import OwnTransport
from tests.engine.protocol_checks import check_update_in_flight
from tests.support.embedded_server import embedded_server
from tests.support.nightly import nightly

SETTINGS = EngineSettings(embedded_slots=4, engine_max_retries=0)
LONG = SamplingParams(temperature=1.0, max_new_tokens=1500, ignore_eos=True)


def pool_over(transport: OwnTransport) -> EnginePool:
    return EnginePool([transport.url], SETTINGS, vocab_size=512, transport=transport)


async def play(pool: EnginePool) -> list[Generation]:
    """Play conversations of three turns with a common beginning; each turn has its own seed."""
    found = []
    for conversation in range(3):
        ids = [10, 60, 61, 62]
        for turn in range(3):
            params = SamplingParams(
                temperature=1.0, top_p=0.9, max_new_tokens=8, ignore_eos=True, sampling_seed=10 * conversation + turn
            )
            found.append(await pool.generate(ids, params, session_id=str(conversation)))
            ids = [*ids, *found[-1].ids, 70 + turn]
    return found


async def running(transport: OwnTransport, count: int) -> None:
    """Wait until this many requests run."""
    with anyio.fail_after(120):
        while (
            orjson.loads((await transport.exchange("GET", f"{transport.url}/v1/loads"))[1])["loads"][0][
                "num_running_reqs"
            ]
            != count
        ):
            await anyio.lowlevel.checkpoint()


async def test_answers_are_those_of_the_server(transport: OwnTransport, tiny_model: Path) -> None:
    here = await play(pool_over(transport))
    with embedded_server(tiny_model, "--slots", "4") as url:
        async with EnginePool([url], SETTINGS, vocab_size=512) as pool:
            there = await play(pool)
    assert [got.ids for got in here] == [got.ids for got in there]
    for mine, theirs in zip(here, there, strict=True):
        assert mine.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)
        assert (mine.text, mine.finish_reason, mine.cached_tokens) == (
            theirs.text,
            theirs.finish_reason,
            theirs.cached_tokens,
        )


async def test_a_cancelled_call_stops_sampling(transport: OwnTransport) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(transport.exchange, "POST", f"{transport.url}/generate", generate_body())
        await running(transport, 1)
        group.cancel_scope.cancel()
    # Only the exchange: no abort_request was sent.
    await running(transport, 0)


def generate_body() -> bytes:
    return orjson.dumps({"input_ids": [1, 2, 3], "sampling_params": LONG.to_wire(), "return_logprob": True})


@pytest.mark.slow
async def test_new_weights_and_their_version(transport: OwnTransport, tiny_model: Path, other_model: Path) -> None:
    pool = pool_over(transport)
    old: list[Generation] = []

    async def call() -> None:
        old.append(await pool.generate([1, 2, 3], LONG))

    greedy = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    before = await pool.generate([1, 2, 3], greedy)
    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await running(transport, 1)
        await pool.receive(DiskUpdate(str(other_model)), "7")
    assert old[0].finish_reason.type == "length"
    assert [version for version, _, _ in old[0].weight_versions] == ["default", "7"]
    after = await pool.generate([1, 2, 3], greedy)
    assert (before.weight_version, after.weight_version) == ("default", "7")
    assert before.ids != after.ids
    assert [info["weight_version"] for info in await pool.model_info()] == ["7"]
    await pool.receive(DiskUpdate(str(tiny_model)), "8")
    assert (await pool.generate([1, 2, 3], greedy)).ids == before.ids


@pytest.mark.parametrize("mode", nightly(["abort", "retract", "in_place"], 1))
async def test_an_update_in_flight(transport: OwnTransport, tiny_model: Path, other_model: Path, mode: str) -> None:
    settings = EngineSettings.model_validate({"embedded_slots": 4, "pause_generation_mode": mode})
    pool = EnginePool([transport.url], settings, vocab_size=512, transport=transport)
    await check_update_in_flight(pool, tiny_model, other_model, 1e-3, partial(running, transport))


async def test_a_crash_of_the_engine_leaves_the_process_alone(
    transport: OwnTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(engine: Engine) -> bool:
        raise RuntimeError("a broken device")

    signals: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", signals.append)
    monkeypatch.setattr(Engine, "step", broken)
    pool = pool_over(transport)
    with pytest.raises(EngineFailure, match="crashed"):  # the engine's last answer, or a connection error
        await pool.generate([1, 2, 3], LONG)
    with pytest.raises(EngineFailure, match="503: the engine in this process has crashed"):
        await pool.generate([1, 2, 3], LONG)
    assert signals == []


async def test_the_process_keeps_its_number_of_threads(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", changes.append)
    settings = EngineSettings(embedded_threads=torch.get_num_threads() + 1, embedded_slots=1)
    async with in_process(settings, tiny_model) as url, HttpTransport(settings) as transport:
        assert (await transport.exchange("GET", f"{url}/health"))[0] == 200
    assert changes == []
