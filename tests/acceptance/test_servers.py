"""One bad engine among two and four: which calls fail, which engine gets requests, and whose tokens are returned."""

import asyncio
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from agentrl.config import RunSettings
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.weights import DiskUpdate
from agentrl.engine.wire import Generation, SamplingParams
from agentrl.errors import AgentRLError, EngineFailure
from agentrl.run.driver import open_folder
from agentrl.run.rollouts import RolloutResources as Playing
from tests.acceptance.servers import (
    AT_ONCE,
    AT_START,
    CALLS,
    SERVERS,
    VERSION,
    VOCABULARY,
    Engine,
    MissesTheUpdate,
    Seen,
    fleet,
)
from tests.support.runs import RunKit

PATIENCE = EngineSettings(engine_retry_backoff=0.01, engine_max_retries=5)
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=8)


async def play(pool: EnginePool, deadline: float) -> tuple[list[Generation], list[EngineFailure]]:
    """Play `CALLS` sessions of one turn, `AT_ONCE` at a time."""
    answers: list[Generation] = []
    failures: list[EngineFailure] = []
    left = iter(range(CALLS))

    async def worker() -> None:
        for number in left:
            try:
                answers.append(await pool.generate([1, 2, 3], PARAMS, session_id=f"s{number}", deadline=deadline))
            except EngineFailure as error:
                failures.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(AT_ONCE):
            group.start_soon(worker)
    return answers, failures


def cases(members: int) -> Iterator[Any]:
    for name, seen in SERVERS.items():
        yield pytest.param(seen, members, id=f"{name}, 1 of {members}", marks=[pytest.mark.slow] * (members > 2))


@pytest.mark.parametrize(("seen", "members"), [*cases(2), *cases(4)])
async def test_a_bad_member_harms_nobody(seen: Seen, members: int) -> None:
    async with fleet(seen.bad(), members=members) as engines:
        bad, *_ = engines
        async with EnginePool([e.url for e in engines], PATIENCE, vocab_size=VOCABULARY) as pool:
            await pool.receive(DiskUpdate("/weights/7"), VERSION)
            async with asyncio.timeout(20):
                answers, failures = await play(pool, seen.deadline)
    assert len(failures) <= seen.failed * CALLS, failures[0]
    assert len(answers) + len(failures) == CALLS
    assert {len(answer.ids) for answer in answers} == {4}
    assert {version for answer in answers for version, *_ in answer.weight_versions} == {VERSION}
    assert bad.served <= seen.fed
    assert not seen.updated or bad.updates > 1


@pytest.mark.parametrize("missing", [1, 2])
async def test_an_update_that_members_miss_is_named_or_they_are_not_fed(missing: int) -> None:
    async with fleet(*(MissesTheUpdate() for _ in range(missing)), members=4) as engines:
        urls = [engine.url for engine in engines]
        async with EnginePool(urls, PATIENCE, vocab_size=VOCABULARY) as pool:
            error: EngineFailure | None = None
            try:
                await pool.receive(DiskUpdate("/weights/7"), VERSION)
            except EngineFailure as raised:
                error = raised
            if error is None:
                answers, _ = await play(pool, deadline=10.0)
                assert {answer.weight_version for answer in answers} == {VERSION}
            else:
                assert any(url in str(error) for url in urls[:missing])
                assert pool.version != VERSION


@pytest.mark.parametrize(("bad", "names"), AT_START.values(), ids=AT_START)
async def test_a_member_that_is_refused_at_the_start(kit: RunKit, bad: type[Engine], names: tuple[str, ...]) -> None:
    async with fleet(bad(), members=2) as engines:
        urls = [engine.url for engine in engines]
        s = RunSettings.from_flat(
            {
                "env": f"{kit.folder}/env.py:AddEnv",
                "hf_checkpoint": str(kit.folder / "model"),
                "prompt_data": str(kit.folder / "prompts.jsonl"),
                "label_key": "label",
                "output_dir": str(kit.folder / bad.__name__),
                "engine": "external",
                "rollout_external_engine_addrs": tuple(urls),
            }
        )
        with open_folder(s) as folder, pytest.raises(AgentRLError) as caught:
            async with Playing.open(s, folder, urls):
                pass
    assert [part for part in (*names, urls[0]) if part not in str(caught.value)] == [], caught.value
