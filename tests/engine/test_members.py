"""Members of a pool come and go: which get requests and weights, and how long a call waits for a member to return."""

import logging
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import orjson
import pytest
from aiohttp import web

from agentrl.engine import requests
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import ConnectionRefused, Headers, HttpTransport, Reply, Sink
from agentrl.engine.weights import DiskUpdate
from agentrl.engine.wire import Generation
from agentrl.errors import EngineRejected, EngineUnreachable, SettingsError
from tests.engine.faults import (
    FAST,
    PARAMS,
    FaultyServer,
    answer,
    hanging,
    ok,
    reset,
    sent,
    serving,
    silence,
    until,
)
from tests.support.virtual_time import virtual_time


async def test_an_engine_with_other_weights_is_noticed_and_given_the_current_ones(tmp_path: Path) -> None:
    settings = FAST.model_copy(update={"engine_probe_interval": 0.1})
    async with (
        serving(ok([5])) as server,
        EnginePool([server.url], settings, vocab_size=512) as pool,
    ):
        await pool.receive(DiskUpdate(str(tmp_path)), "7")
        assert (await pool.generate([1], PARAMS)).weight_version == "7"
        server.version = "default"  # restarted, and the pool has not noticed
        assert (await pool.generate([1], PARAMS)).weight_version == "7"
    assert server.loaded == [str(tmp_path)] * 2


async def test_log_probs_of_other_weights_are_refused(tmp_path: Path) -> None:
    found = [[None, 1, None], [-1.0, 2, None], [-2.0, 3, None]]
    settings = FAST.model_copy(update={"engine_probe_interval": 0.1})
    async with (
        serving(ok([], input_token_logprobs=found)) as server,
        EnginePool([server.url], settings, vocab_size=512) as pool,
    ):
        await pool.receive(DiskUpdate(str(tmp_path)), "7")
        server.version = "default"  # restarted, and the pool has not noticed
        assert await pool.log_probs([1, 2, 3], 2) == [-1.0, -2.0]
    assert server.loaded == [str(tmp_path)] * 2


async def test_weights_that_were_broadcast_cannot_be_given_again() -> None:
    async with serving(ok([5])) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        pool._registry.sent("7", None, pool.members)
        with pytest.raises(EngineUnreachable, match="--update-weight-mode disk") as caught:
            await pool.generate([1], PARAMS)
    assert caught.value.kind == "no_current_weights"


async def test_an_engine_that_cannot_load_the_weights_again_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_BACKOFF", 0.1)
    settings = FAST.model_copy(update={"engine_probe_interval": 0.05})
    async with serving(ok([5])) as server, EnginePool([server.url], settings, vocab_size=512) as pool:
        await pool.receive(DiskUpdate(str(tmp_path)), "7")
        server.version, server.load_status = "default", 400
        with anyio.fail_after(60), pytest.raises(EngineUnreachable) as caught:
            await pool.generate([1], PARAMS)
    assert caught.value.kind == "no_current_weights"
    assert f"/update_weights_from_disk at {server.url} answered 400" in str(caught.value)


async def test_a_pool_whose_engines_have_all_left_is_named() -> None:
    async with serving(ok([5])) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        pool.leave(server.url)
        with anyio.fail_after(60), pytest.raises(EngineUnreachable) as caught:
            await pool.generate([1], PARAMS)
    assert caught.value.kind == "no_engine"


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


async def test_an_engine_gets_no_request_before_it_is_checked() -> None:
    async with serving(ok([5])) as one, serving(ok([6])) as two, EnginePool([one.url], FAST, vocab_size=512) as pool:
        two.deaf = True
        async with anyio.create_task_group() as group:
            group.start_soon(pool.join, two.url)
            await until(lambda: two.probes > 0)
            assert {(await pool.generate([1], PARAMS)).ids[0] for _ in range(4)} == {5}
            group.cancel_scope.cancel()
        assert pool.urls == (one.url,)


async def test_an_engine_joins_in_place_of_one_that_does_not_answer(tmp_path: Path) -> None:
    settings = FAST.model_copy(update={"engine_control_timeout": 1.0})
    async with (
        serving(ok([5])) as one,
        serving(ok([6])) as two,
        serving(ok([7])) as three,
        EnginePool([one.url, two.url], settings, vocab_size=512) as pool,
    ):
        await pool.receive(DiskUpdate(str(tmp_path)), "7")
        one.deaf = True
        await pool.join(three.url)
        assert {(await pool.generate([1], PARAMS)).ids[0] for _ in range(4)} == {6, 7}
        with pytest.raises(EngineUnreachable):
            await pool.join("http://127.0.0.1:9")


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


# ---- nobody is there ---------------------------------------------------------------------------------------------


class Refusing(HttpTransport):
    """Refuses this many connections after the first request has been lost."""

    def __init__(self) -> None:
        super().__init__(EngineSettings())
        self.down, self.refused = False, 0

    async def exchange(
        self, method: str, url: str, body: bytes | None = None, headers: Headers = None, sink: Sink = None
    ) -> Reply:
        if self.down and url.endswith("/generate"):
            self.refused += 1
            self.down = self.refused < 8
        if self.down:
            raise ConnectionRefused("refused", kind="engine_refused")
        return await super().exchange(method, url, body, headers, sink)


async def test_patience_for_an_engine_that_is_gone_counts_from_when_it_went() -> None:
    settings = EngineSettings(
        engine_absence_timeout=0.4, engine_retry_backoff=0.0, engine_max_retries=3, engine_probe_interval=1000.0
    )

    async def dies(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        await anyio.sleep(0.5)  # longer than the timeout
        transport.down = True
        return await reset(server, body, request)

    async with (
        serving(dies, ok([5])) as server,
        Refusing() as transport,
        EnginePool([server.url], settings, vocab_size=512, transport=transport) as pool,
    ):
        assert (await pool.generate([1], PARAMS)).ids == [5]
    assert transport.refused == 8


async def test_an_engine_that_was_long_away_may_come_back_without_the_weights(tmp_path: Path) -> None:
    settings = EngineSettings(engine_retry_backoff=0.0, engine_max_retries=3, engine_probe_interval=0.5)

    async def dies(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        transport.down, server.version = True, "default"
        return await reset(server, body, request)

    async with (
        serving(dies, ok([5])) as server,
        Refusing() as transport,
        EnginePool([server.url], settings, vocab_size=512, transport=transport) as pool,
    ):
        await pool.receive(DiskUpdate(str(tmp_path)), "7")
        assert (await pool.generate([1], PARAMS)).weight_version == "7"
    assert transport.refused == 8


async def test_a_hung_engine_is_broken_off_also_when_it_was_lost_before() -> None:
    settings = FAST.model_copy(update={"engine_probe_interval": 0.1, "engine_max_retries": 0})
    async with serving(silence) as hung, EnginePool([hung.url], settings, vocab_size=512) as pool:
        hung.deaf = True
        await until(lambda: pool.members[0].weights == "unknown")
        with pytest.raises(EngineUnreachable, match="does not answer any more"):
            await pool.generate([1], PARAMS, deadline=5.0)


async def test_an_engine_whose_scheduler_hangs_is_taken_out_and_its_requests_go_elsewhere(tmp_path: Path) -> None:
    settings = FAST.model_copy(update={"engine_probe_interval": 0.2, "engine_hang_timeout": 0.5})
    async with (
        serving(hanging) as hung,
        serving(ok([6])) as well,
        EnginePool([hung.url, well.url], settings, vocab_size=512) as pool,
    ):
        await pool.receive(DiskUpdate("first"), "1")
        hung.hangs = True
        found: list[Generation] = []

        async def play() -> None:
            found.append(await pool.generate([1, 2], PARAMS))

        with anyio.fail_after(120):
            async with anyio.create_task_group() as group:
                for _ in range(8):
                    group.start_soon(play)
        assert hung.generates, "it had requests"
        assert [each.ids for each in found] == [[6]] * 8
        assert pool.members[0].weights == "unknown"

        with anyio.fail_after(120):
            await pool.receive(DiskUpdate("second"), "2")
        assert (hung.loaded, well.loaded) == (["first"], ["first", "second"]), "an update does not wait for it"
        hung.hangs = False
        await until(lambda: pool.members[0].weights == "current")
        assert hung.loaded == ["first", "second"]


async def test_an_engine_that_is_paused_for_an_update_does_not_hang() -> None:
    settings = FAST.model_copy(update={"engine_probe_interval": 0.05, "engine_hang_timeout": 0.05})
    async with serving(ok([5])) as server, EnginePool([server.url], settings, vocab_size=512) as pool:
        server.load_gate = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(pool.receive, DiskUpdate("first"), "1")
            await until(lambda: bool(server.loaded))
            server.paused = True
            tries, probes = server.tries, server.probes
            await until(lambda: server.probes > probes + 5)
            assert server.tries == tries, "nobody asks it to generate"
            assert pool.members[0].weights == "current"
            server.paused = False
            server.load_gate.set()
        assert (await pool.generate([1], PARAMS)).weight_version == "1"


# ---- members that are brought back -------------------------------------------------------------------------------


async def test_an_engine_that_hangs_during_its_recovery_delays_no_other_engine(tmp_path: Path) -> None:
    settings = FAST.model_copy(update={"engine_probe_interval": 0.05})
    async with (
        serving(ok([5])) as hangs,
        serving(ok([6])) as well,
        EnginePool([hangs.url, well.url], settings, vocab_size=512) as pool,
    ):
        await pool.receive(DiskUpdate("first"), "1")
        hangs.load_gate = gate = anyio.Event()
        hangs.version = "other"
        pool._registry.mark_stale(pool.members[0])
        await until(lambda: len(hangs.loaded) == 2)
        for _ in range(3):
            pool._registry.lost(pool.members[1])
            await until(lambda: pool.members[1].weights == "current")
        assert len(hangs.loaded) == 2, "it is not asked again while it loads"
        hangs.load_gate = None
        with anyio.fail_after(120):
            await pool.receive(DiskUpdate("second"), "2")
        assert [member.weights for member in pool.members] == ["current"] * 2
        assert not pool.members[0]._calls, "nobody brings it back to the weights before"
        gate.set()


async def test_why_an_engine_cannot_be_brought_back_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    settings = FAST.model_copy(update={"engine_probe_interval": 0.05})
    async with serving(ok([5])) as server, EnginePool([server.url], settings, vocab_size=512) as pool:
        await pool.receive(DiskUpdate("first"), "1")
        server.load_status, server.version = 400, "other"
        with caplog.at_level(logging.WARNING):
            pool._registry.mark_stale(pool.members[0])
            await until(lambda: len(server.loaded) == 5)
            assert caplog.text.count("answered 400") == 1
            server.load_status = 409
            await until(lambda: len(server.loaded) == 8)
    assert caplog.text.count("answered 409") == 1


async def test_requests_of_an_engine_that_leaves_go_elsewhere_without_a_retry() -> None:
    settings = FAST.model_copy(update={"engine_max_retries": 0})
    got: list[Generation] = []
    async with (
        serving(silence) as leaves,
        serving(ok([6])) as stays,
        EnginePool([leaves.url], settings, vocab_size=512) as pool,
    ):

        async def call() -> None:
            got.append(await pool.generate([1], PARAMS))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await leaves.arrived.wait()
            await pool.join(stays.url)
            pool.leave(leaves.url)
        assert got[0].ids == [6]
        figures = pool.figures()
    assert (figures["engines/lost"], figures["engines/failed"]) == (0, 0)


async def test_sessions_of_an_engine_that_leaves_while_it_is_updated_go_elsewhere() -> None:
    async with serving(ok([5])) as leaves, EnginePool([leaves.url], FAST, vocab_size=512) as pool:
        await pool.generate([1], PARAMS, session_id="s")
        left = pool.members[0]
        async with serving(ok([6])) as stays:
            await pool.join(stays.url)
            pool.leave(leaves.url)
            pool._registry.sent("1", None, (left, *pool.members))  # it loaded them, and then it was gone
            assert (await pool.generate([1], PARAMS, session_id="s", deadline=5.0)).ids == [6]
        assert left.in_flight == 0


async def test_a_call_that_waited_for_a_place_is_not_sent_to_weights_found_stale_meanwhile(tmp_path: Path) -> None:
    release = anyio.Event()

    async def slow(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        await release.wait()
        return await ok([5])(server, body, request)

    settings = FAST.model_copy(update={"sglang_server_concurrency": 1, "engine_absence_timeout": 60.0})
    async with serving(slow) as server, EnginePool([server.url], settings, vocab_size=512) as pool:
        await pool.receive(DiskUpdate(str(tmp_path)), "7")
        places = pool.members[0].places
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.generate, [1], PARAMS)
            await until(lambda: sent(server, 1))
            tasks.start_soon(pool.generate, [2], PARAMS)
            await until(lambda: places.statistics().tasks_waiting == 1)
            server.version, server.load_gate = "default", anyio.Event()
            pool._registry.mark_stale(pool.members[0])
            release.set()
            await until(lambda: places.value == 1)
            assert [body["input_ids"] for body in server.generates] == [[1]]
            server.load_gate.set()
    assert [2] in [body["input_ids"] for body in server.generates]
    assert len(server.loaded) == 2


async def test_a_lost_engine_is_not_brought_back_while_weights_are_updated(tmp_path: Path) -> None:
    settings = FAST.model_copy(update={"engine_probe_interval": 0.3})
    async with (
        serving(ok([5])) as one,
        serving(ok([6])) as two,
        EnginePool([one.url, two.url], settings, vocab_size=512) as pool,
    ):
        await pool.receive(DiskUpdate(str(tmp_path / "a")), "7")
        one.load_gate = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.receive, DiskUpdate(str(tmp_path / "b")), "8")
            await until(lambda: len(one.loaded) == 2)
            pool._registry.mark_stale(pool.members[1])
            probes = two.probes
            await until(lambda: two.probes > probes + 2)
            assert two.loaded == [str(tmp_path / "a"), str(tmp_path / "b")], "nobody but the update loads weights"
            one.load_gate.set()


class Scripted(HttpTransport):
    """Answers each `/generate` and each probe with the next entry of its script, then always with the last."""

    def __init__(self, generates: list[Reply], probes: list[int]) -> None:
        super().__init__(EngineSettings())
        self.generates, self.probes = generates, probes

    async def exchange(
        self, method: str, url: str, body: bytes | None = None, headers: Headers = None, sink: Sink = None
    ) -> Reply:
        await anyio.lowlevel.checkpoint()
        if url.endswith("/generate"):
            return self.generates.pop(0) if len(self.generates) > 1 else self.generates[0]
        if url.endswith("/health"):
            return Reply(self.probes.pop(0) if len(self.probes) > 1 else self.probes[0], b"")
        return Reply(200, b"{}")


@virtual_time
async def test_the_only_engine_is_asked_again_when_it_said_and_not_before() -> None:
    busy = Reply(429, b"busy", 300.0)
    transport = Scripted([busy, busy, Reply(200, orjson.dumps(answer([5], prompt_tokens=1)))], [200])
    async with EnginePool(["http://one"], FAST, vocab_size=512, transport=transport) as pool:
        began = anyio.current_time()
        assert (await pool.generate([1], PARAMS)).ids == [5]
        assert anyio.current_time() - began >= 600


@virtual_time
async def test_probes_missed_long_ago_do_not_count() -> None:
    """Every other probe is missed: an engine counts as lost only after two in a row."""
    transport = Scripted([Reply(200, b"")], [503, 200] * 50)
    async with EnginePool(["http://one"], FAST, vocab_size=512, transport=transport) as pool:
        while len(transport.probes) > 1:
            await anyio.sleep(1)
            assert pool.members[0].weights == "current"
        assert pool._registry.counts["lost"] == 0


class Unanswered(Scripted):
    """Answers no try, and needs 250 s for an update."""

    tried: anyio.Event

    async def exchange(
        self, method: str, url: str, body: bytes | None = None, headers: Headers = None, sink: Sink = None
    ) -> Reply:
        if url.endswith("/health_generate"):
            self.tried.set()
            await anyio.sleep_forever()
        if url.endswith("/update_weights_from_disk"):
            await anyio.sleep(250)
        return await super().exchange(method, url, body, headers, sink)


@virtual_time
async def test_an_update_that_begins_during_a_try_makes_no_engine_hang(tmp_path: Path) -> None:
    transport = Unanswered([Reply(200, b"")], [200])
    transport.tried = anyio.Event()
    async with EnginePool(["http://one"], FAST, vocab_size=512, transport=transport) as pool:
        await transport.tried.wait()
        await pool.receive(DiskUpdate(str(tmp_path)), "7")
        assert pool._registry.counts["lost"] == 0


class Paused(Scripted):
    """Begins an update during each probe, which then fails: the engine is paused."""

    updating: anyio.Event

    async def exchange(
        self, method: str, url: str, body: bytes | None = None, headers: Headers = None, sink: Sink = None
    ) -> Reply:
        if url.endswith("/health"):
            self.updating.set()
            await anyio.sleep(1)
        if url.endswith("/update_weights_from_disk"):
            self.updating = anyio.Event()
            await anyio.sleep(1.5)  # ends before the next probe
        return await super().exchange(method, url, body, headers, sink)


@virtual_time
async def test_probes_that_fail_as_an_update_pauses_the_engine_are_no_misses(tmp_path: Path) -> None:
    transport = Paused([Reply(200, b"")], [503])
    transport.updating = anyio.Event()
    async with EnginePool(["http://one"], FAST, vocab_size=512, transport=transport) as pool:
        for version in range(4):
            await transport.updating.wait()
            await pool.receive(DiskUpdate(str(tmp_path)), str(version))
            assert pool._registry.counts["lost"] == 0


async def test_an_engine_that_answers_again_is_resumed() -> None:
    """The process that paused it may have ended."""
    settings = FAST.model_copy(update={"engine_probe_interval": 0.1})
    async with serving(ok([5])) as server, EnginePool([server.url], settings, vocab_size=512) as pool:
        pool._registry.lost(pool.members[0])
        await until(lambda: pool.members[0].weights == "current")
        assert "POST /continue_generation" in server.paths


class Away(Scripted):
    """Refuses connections before this time on the loop's clock. The next request then finds a restarted engine."""

    def __init__(self, until: float) -> None:
        super().__init__([Reply(200, orjson.dumps(answer([5], prompt_tokens=1)))], [200])
        self.until = until

    async def exchange(
        self, method: str, url: str, body: bytes | None = None, headers: Headers = None, sink: Sink = None
    ) -> Reply:
        if anyio.current_time() < self.until:
            raise ConnectionRefused("refused", kind="engine_refused")
        return await super().exchange(method, url, body, headers, sink)


@virtual_time
async def test_an_update_waits_for_the_only_engine_to_be_started_again(tmp_path: Path) -> None:
    settings = FAST.model_copy(update={"engine_absence_timeout": 60.0})
    transport = Away(anyio.current_time() + 50)
    async with EnginePool(["http://one"], settings, vocab_size=512, transport=transport) as pool:
        assert await pool.epoch()
        transport.until = anyio.current_time() + 50
        await pool.receive(DiskUpdate(str(tmp_path)), "7")
        transport.until = anyio.current_time() + 100
        with pytest.raises(EngineUnreachable):
            await pool.receive(DiskUpdate(str(tmp_path)), "8")


@virtual_time
async def test_attempts_at_a_lost_engine_do_not_count_as_retries(tmp_path: Path) -> None:
    """With one retry: the engine is lost with the request, answers 503 for a while, and returns."""
    settings = FAST.model_copy(
        update={"engine_absence_timeout": 60.0, "engine_max_retries": 1, "engine_retry_backoff": 1.0}
    )
    good = Reply(200, orjson.dumps(answer([5], prompt_tokens=1)))
    transport = Scripted([*[Reply(503, b"starting")] * 9, good], [503] * 20 + [200])
    async with EnginePool(["http://one"], settings, vocab_size=512, transport=transport) as pool:
        pool._registry.lost(pool.members[0])
        assert (await pool.generate([1], PARAMS)).ids == [5]


async def test_engines_that_were_started_again_lack_weights_that_were_broadcast() -> None:
    async with serving(ok([5])) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        pool._registry.sent("7", None, pool.members)
        assert not await pool.lacks_weights()
        pool._registry.lost(pool.members[0])
        await pool._registry.regain(pool.members[0])
        assert await pool.lacks_weights()
        pool._registry.sent("7", None, pool.members)
        assert not await pool.lacks_weights()
