"""A real SGLang server through the launcher and the pool."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskStatus

from agentrl.engine.commands import EngineNode
from agentrl.engine.launcher import launch
from agentrl.engine.pool import EnginePool
from agentrl.engine.process import EngineProcess
from agentrl.engine.wire import SamplingParams
from agentrl.run.training import free_port
from tests.engine import protocol_checks as checks
from tests.support.real_sglang import MARKS, sglang_settings

TOLERANCE = 0.02

pytestmark = MARKS


@pytest.fixture
async def pool(tiny_model: Path, tmp_path: Path) -> AsyncIterator[EnginePool]:
    settings = sglang_settings()
    async with (
        launch(settings, tiny_model, log_dir=tmp_path) as engines,
        EnginePool([engine.url for engine in engines], settings, vocab_size=512) as pool,
    ):
        yield pool


async def test_everything_an_engine_must_do(pool: EnginePool, tiny_model: Path, other_model: Path) -> None:
    # One test and one server: a start costs half a minute.
    await checks.check_generate(pool, tiny_model, TOLERANCE)
    await checks.check_scores(pool, tiny_model, TOLERANCE)
    await checks.check_abort(pool)
    await checks.check_cancel(pool)
    await checks.check_every_mode(pool, tiny_model, other_model, TOLERANCE)
    await checks.check_broadcast(pool, tiny_model, TOLERANCE)


async def test_an_engine_of_two_machines_is_started_again_as_a_whole(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts of SGLang run on two simulated machines; one is killed."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    settings = sglang_settings().model_copy(update={"engine_absence_timeout": 600.0})
    meeting = f"127.0.0.1:{free_port()}"
    params = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)

    async def run(rank: int, *, task_status: TaskStatus[EngineProcess]) -> None:
        part = EngineNode(rank, 2, meeting)
        async with launch(settings, tiny_model, log_dir=tmp_path, gpus_per_engine=2, node=part) as (engine,):
            task_status.started(engine)
            await anyio.sleep_forever()

    async with anyio.create_task_group() as parts:
        found: dict[int, EngineProcess] = {}

        async def start(rank: int) -> None:
            found[rank] = await parts.start(run, rank)

        async with anyio.create_task_group() as starting:
            for rank in range(2):
                starting.start_soon(start, rank)
        async with EnginePool([found[0].url], settings, vocab_size=512) as pool:
            before = (await pool.generate([5, 6, 7], params)).ids
            first = [engine.pid for engine in found.values()]
            found[1].kill()
            assert (await pool.generate([5, 6, 7], params)).ids == before
            assert not {engine.pid for engine in found.values()} & {*first}
        parts.cancel_scope.cancel()
