"""Engines of a pool that offload their memory while another program needs it."""

import math
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest

from agentrl.engine.local import in_process
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import ConnectionLost, Reply
from agentrl.engine.weights import WHOLE, DiskUpdate
from agentrl.engine.wire import SamplingParams
from agentrl.errors import EngineRejected
from tests.engine.test_weight_update import Recorder

REAL = EngineSettings(embedded_slots=4, engine_max_retries=0)
SETTINGS = EngineSettings(engine_max_retries=0, engine_probe_interval=0.05)  # a stand-in answers at once
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=1.0, max_new_tokens=2000, ignore_eos=True)
WEIGHTS = frozenset({"weights"})


class Saver(Recorder):
    """Engines that report their capabilities and the number of their restarts."""

    def __init__(self, saver: bool) -> None:
        super().__init__()
        self.info: dict[str, Any] = {"enable_memory_saver": saver, "startup_time": 1.0}
        self.misses, self.released = 0, anyio.Event()

    async def exchange(self, method: str, url: str, *rest: Any, **more: Any) -> Reply:
        if self.misses:
            self.misses -= 1
            raise ConnectionLost("it is being started again", kind="engine_lost")
        if url.endswith("/server_info"):
            return Reply(200, orjson.dumps(self.info))
        reply = await super().exchange(method, url, *rest, **more)
        if url.endswith("/release_memory_occupation"):
            self.released.set()
        return reply

    def moved(self) -> list[tuple[str, list[str]]]:
        """Return the requests to one engine since the last call."""
        found = [(path.split("_")[0][1:], body["tags"]) for host, path, body in self.calls if body and host == "one"]
        self.calls.clear()
        return found


async def test_calls_wait_with_their_tokens_until_everything_is_there_again(
    tiny_model: Path, other_model: Path
) -> None:
    async with (
        in_process(REAL, tiny_model) as url,
        EnginePool([url], REAL, vocab_size=512) as pool,
        anyio.create_task_group() as tasks,
    ):
        before = await pool.generate([10, 60, 61], GREEDY)
        done: list[int] = []

        async def play() -> None:
            done.extend((await pool.generate([10, 60, 61], LONG)).ids)

        tasks.start_soon(play)
        await anyio.wait_all_tasks_blocked()
        await pool.set_resident_memory(frozenset())
        await pool.resume()
        assert pool.pause_gate.closed
        await pool.set_resident_memory(WEIGHTS)
        await pool.receive(DiskUpdate(str(other_model)), "1")
        await anyio.wait_all_tasks_blocked()
        assert pool.pause_gate.closed
        assert not done
        await pool.set_resident_memory(WHOLE)
        other = await pool.generate([10, 60, 61], GREEDY)
        assert other.ids != before.ids
        await pool.set_resident_memory(frozenset())
        await pool.set_resident_memory(WHOLE)
        again = await pool.generate([10, 60, 61], GREEDY)
        assert again.ids == other.ids
    assert len(done) == 2000


async def test_engines_are_asked_for_what_they_have_and_no_more() -> None:
    engines = Saver(True)
    pool = EnginePool(["http://one", "http://two"], SETTINGS, vocab_size=8, transport=engines)
    await pool.set_resident_memory(WHOLE)
    assert engines.moved() == []
    await pool.set_resident_memory(WEIGHTS)
    assert engines.moved() == [("release", ["kv_cache"])]
    await pool.set_resident_memory(frozenset())
    assert engines.moved() == [("release", ["weights"])]
    engines.info["startup_time"] = 2.0
    await pool.set_resident_memory(frozenset())
    assert engines.moved() == [("release", ["kv_cache", "weights"])], "an engine that was started again has all of it"
    await pool.set_resident_memory(WHOLE)
    assert engines.moved() == [("resume", ["kv_cache", "weights"])]


async def test_an_engine_that_missed_the_call_takes_its_memory_before_the_weights() -> None:
    class Misses(Saver):
        async def exchange(self, method: str, url: str, *rest: Any, **more: Any) -> Reply:
            if url.endswith("/resume_memory_occupation"):
                self.lost, now = False, self.lost
                if now:
                    raise ConnectionLost("a busy machine", kind="engine_lost")
            return await super().exchange(method, url, *rest, **more)

        lost = True

    engines = Misses(True)
    pool = EnginePool(["http://one"], SETTINGS, vocab_size=8, transport=engines)
    await pool.set_resident_memory(frozenset())
    await pool.set_resident_memory(WEIGHTS)
    await pool.receive(DiskUpdate("folder"), "1")
    paths = engines.paths("one")
    assert paths.index("/resume_memory_occupation") < paths.index("/update_weights_from_disk")


async def test_an_engine_without_a_memory_saver_is_named() -> None:
    pool = EnginePool(["http://one"], SETTINGS, vocab_size=8, transport=Saver(False))
    with pytest.raises(EngineRejected, match="http://one cannot free its memory .*--enable-memory-saver, or set"):
        await pool.set_resident_memory(frozenset())


class ReleasedWeights(Saver):
    """An engine whose offloaded base weights return as NaN, unless it keeps a copy."""

    def __init__(self, backup: bool) -> None:
        super().__init__(saver=True)
        self.info["enable_weights_cpu_backup"] = backup
        self.base = [1.0, 2.0]

    async def exchange(self, method: str, url: str, body: bytes | None = None, *rest: Any, **more: Any) -> Reply:
        reply = await super().exchange(method, url, body, *rest, **more)
        released = url.endswith("/release_memory_occupation") and "weights" in orjson.loads(body or b"{}")["tags"]
        if released and not self.info["enable_weights_cpu_backup"]:
            self.base = [math.nan for _ in self.base]
        return reply


@pytest.mark.parametrize("backup", [True, False])
async def test_the_base_of_an_adapter_is_released_only_if_the_engine_keeps_a_copy(backup: bool) -> None:
    engine = ReleasedWeights(backup)
    pool = EnginePool(["http://one"], SETTINGS, vocab_size=8, transport=engine)
    await pool.set_resident_memory(WEIGHTS)
    await pool.receive(DiskUpdate("folder", "adapter-1"), "1")
    await pool.set_resident_memory(WHOLE)
    if backup:
        await pool.set_resident_memory(frozenset())
        await pool.set_resident_memory(WHOLE)
    else:
        with pytest.raises(EngineRejected, match="--enable-weights-cpu-backup, or set --no-offload-rollout"):
            await pool.set_resident_memory(frozenset())
    assert all(map(math.isfinite, engine.base))


async def test_whole_updates_need_no_copy() -> None:
    pool = EnginePool(["http://one"], SETTINGS, vocab_size=8, transport=ReleasedWeights(backup=False))
    await pool.receive(DiskUpdate("folder"), "1")
    await pool.set_resident_memory(frozenset())


async def test_an_engine_that_returns_while_others_are_offloaded_offloads_too() -> None:
    engines = Saver(True)
    async with EnginePool(["http://one"], SETTINGS, vocab_size=8, transport=engines) as pool:
        await pool.set_resident_memory(frozenset())
        engines.moved()
        engines.info["startup_time"], engines.misses, engines.released = 2.0, 2, anyio.Event()
        with anyio.fail_after(120):
            await engines.released.wait()
        assert engines.moved() == [("release", ["kv_cache", "weights"])]
        assert pool.members[0].weights == "unknown", "it has none to play with"
