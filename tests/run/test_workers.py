"""Several rollout workers: which worker gets which group, and the groups of a worker that dies."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace

import anyio
import pytest

from agentrl.buffer.codec import encode_group
from agentrl.config import RunSettings
from agentrl.engine.pool import EnginePool
from agentrl.engine.weights import DiskUpdate
from agentrl.errors import AgentRLError, EngineUnreachable, PluginError
from agentrl.rollout.failures import DropGroup
from agentrl.rollout.filters import FilterOutput
from agentrl.rollout.stats import RolloutStats, Tally
from agentrl.rollout.worker import Lease, LeaseProgress, Played, WorkerLost
from agentrl.run.protocols import ComponentLost
from agentrl.run.workers import (
    Answer,
    CallProgress,
    EngineView,
    Order,
    RolloutProcess,
    RolloutWorkers,
    WorkerServer,
    share,
)
from tests.buffer.make import finished


class Process(RolloutProcess):
    """A process whose answers the test gives."""

    def __init__(self, error: AgentRLError | None = None) -> None:
        self.error, self.dead = error, asyncio.Event()
        self.orders: list[Order] = []
        self.views: list[EngineView] = []
        self.messages: asyncio.Queue[CallProgress | Answer] = asyncio.Queue()
        self.killed = self.hangs = self.stopped = self.closing_fails = False

    async def serve(self) -> None:
        if self.error is not None:
            raise self.error
        await self.dead.wait()
        if not self.stopped or self.closing_fails:
            raise ComponentLost("it died")

    async def ready(self) -> None:
        if self.error is not None:
            await asyncio.Event().wait()

    async def follow(self, view: EngineView) -> None:
        self.views.append(view)
        if self.hangs:
            await asyncio.Event().wait()

    async def figures(self) -> Mapping[str, float]:
        return {"loop/busy_share": 0.5, "engines/in_flight": 3.0, "engines/prefix_cache_hit_rate": 0.5}

    async def take_orders(self, orders: Sequence[Order]) -> None:
        if self.dead.is_set():
            raise ComponentLost("it died")
        self.orders += orders

    async def answers(self) -> list[CallProgress | Answer]:
        return [await self.messages.get()]

    async def stop(self) -> None:
        assert not self.killed
        self.stopped = True
        self.dead.set()

    def kill(self) -> None:
        self.killed = True

    def end(self, at: int, *, keep: bool = True, call: int | None = None) -> None:
        """Answer order number `at` of this process."""
        order = self.orders[at]
        assert isinstance(order.what, Lease)
        verdict = FilterOutput(keep, None if keep else "flat")
        data = encode_group(finished(order.what.group_id))
        played = Played(order.what.number, verdict, [], data, 3)
        self.messages.put_nowait(Answer(order.call if call is None else call, played))


class Farm:
    """The workers of a test and all processes that they started."""

    def __init__(self, errors: Sequence[AgentRLError | None] = ()) -> None:
        self.started: list[Process] = []
        self.errors = list(errors)
        self.said: list[LeaseProgress] = []

    def start(self, number: int) -> Process:
        self.started.append(Process(self.errors.pop(0) if self.errors else None))
        return self.started[-1]

    @asynccontextmanager
    async def open(self, **settings: object) -> AsyncIterator[RolloutWorkers]:
        given = RunSettings.from_flat({"rollout_workers": 2, "hf_checkpoint": "model", **settings})
        self.pool = EnginePool(["http://a"], vocab_size=None)
        async with RolloutWorkers.open(given, self.start, self.pool) as workers:
            yield workers

    def play(self, workers: RolloutWorkers, number: int) -> "asyncio.Task[Played]":
        return asyncio.ensure_future(workers.play(Lease(number, number, 0, finished(number)), self.said.append))


async def settle() -> None:
    """Let all tasks run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_groups_go_to_the_least_busy_worker_and_results_come_back() -> None:
    farm = Farm()
    async with farm.open() as workers:
        calls = [farm.play(workers, number) for number in range(4)]
        await settle()
        first, second = farm.started
        assert [len(first.orders), len(second.orders)] == [2, 2]
        first.messages.put_nowait(CallProgress(first.orders[0].call, LeaseProgress(0, 1, RolloutStats(graded=1))))
        first.end(0)
        assert (await calls[0]).trained == 3
        assert farm.said == [LeaseProgress(0, 1, RolloutStats(graded=1))]
        calls.append(farm.play(workers, 4))
        await settle()
        assert [len(first.orders), len(second.orders)] == [3, 2]
        second.end(0, keep=False)
        dropped = await calls[1]
        assert [s.tokens for s in dropped.group] == [s.tokens for s in finished(1)], "the viewer shows dropped groups"
        assert dropped.data == b""
        for call in calls[2:]:
            call.cancel()
        await settle()
        assert [order.what for order in (*first.orders[3:], *second.orders[2:])] == [None] * 3
        for process in (first, second):
            for order in process.orders:
                process.messages.put_nowait(Answer(order.call))
        assert all(
            isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*calls[2:], return_exceptions=True)
        )
    for process in (first, second):
        assert process.stopped, "the user's code is not torn down"
        assert process.killed


async def test_a_dead_worker_is_replaced_its_leases_return_and_late_results_are_discarded() -> None:
    farm = Farm()
    async with farm.open() as workers:
        calls = [farm.play(workers, number) for number in range(2)]
        await settle()
        victim, other = farm.started
        victim.dead.set()
        with pytest.raises(WorkerLost):
            await calls[0]
        await settle()
        assert len(farm.started) == 3
        assert victim.killed
        again = farm.play(workers, 7)
        await settle()
        new = farm.started[2]
        assert [order.what.number for order in new.orders if isinstance(order.what, Lease)] == [7]
        new.end(0, call=victim.orders[0].call)
        await settle()
        assert not again.done(), "the result of the lost lease is not the result of this one"
        new.end(0)
        assert (await again).lease == 7
        other.end(0)
        await calls[1]


async def test_a_group_of_an_evaluation_is_played_again_after_its_worker_died() -> None:
    farm, tally = Farm(), Tally()
    async with farm.open() as workers:
        call = asyncio.ensure_future(workers.evaluate(1, finished(3), tally))
        await settle()
        farm.started[0].dead.set()
        await settle()
        process = next(one for one in farm.started[1:] if one.orders)
        assert process.orders[0].set_number == 1
        answer = Answer(process.orders[0].call, encode_group(finished(3)), RolloutStats(graded=2))
        process.messages.put_nowait(answer)
        assert [s.tokens for s in await call] == [s.tokens for s in finished(3)]
        assert tally.stats.graded == 2
        dropped = asyncio.ensure_future(workers.evaluate(0, finished(4), tally))
        await settle()
        process = next(one for one in farm.started if one.orders and one.orders[-1].set_number == 0)
        process.messages.put_nowait(Answer(process.orders[-1].call, None, RolloutStats(), "too long"))
        with pytest.raises(DropGroup, match="too long"):
            await dropped


async def test_a_group_of_an_evaluation_that_kills_its_workers_is_dropped() -> None:
    farm = Farm()
    async with farm.open() as workers:
        call = asyncio.ensure_future(workers.evaluate(1, finished(3), Tally()))
        while not call.done():
            await settle()
            for process in farm.started:
                if process.orders:
                    process.dead.set()
        with pytest.raises(DropGroup, match="worker lost"):
            await call
    assert sum(bool(process.orders) for process in farm.started) == 5


async def test_workers_follow_the_engines_also_one_that_starts_during_an_update(
    caplog: pytest.LogCaptureFixture,
) -> None:
    farm = Farm()
    async with farm.open(engine_control_timeout=0.1) as workers:
        assert farm.pool.followers == (workers,)
        await workers.hold(idle=False)
        farm.started[0].dead.set()
        await settle()
        folder = DiskUpdate("/weights/2")
        await workers.release("2", folder)
        seen = [[(view.held, view.version) for view in process.views] for process in farm.started]
        assert seen == [
            [("", None), ("update", None)],
            [("", None), ("update", None), ("", "2")],
            [("update", None), ("", "2")],
        ]
        farm.started[1].hangs = True
        await workers.pause()
        await settle()
        assert farm.started[1].killed, "one that does not stop is replaced"
        assert "rollout worker 1 is lost and is replaced: it does not answer" in caplog.text
        assert farm.started[3].views[-1].held == "rollout"
    assert not farm.pool.followers


async def test_a_worker_that_starts_follows_what_changes_while_it_is_told() -> None:
    farm = Farm()
    async with farm.open() as workers:
        first = farm.start

        def start(number: int) -> Process:
            process = first(number)
            follow = process.follow

            async def slow(view: EngineView) -> None:
                if not process.views:  # an update ends during the call
                    await workers.release("2", None)
                await follow(view)

            process.follow = slow  # type: ignore[method-assign]
            return process

        workers._start = start
        await workers.hold(idle=False)
        farm.started[0].dead.set()
        await settle()
        assert [view.version for view in farm.started[2].views] == [None, "2"]


async def test_what_a_worker_cannot_open_ends_the_run_at_once_and_one_that_dies_at_each_start_too() -> None:
    farm = Farm([None, PluginError("no module 'kenv'")])
    with pytest.raises(PluginError, match="kenv"):
        async with farm.open():
            pass
    assert len(farm.started) == 2
    farm = Farm([ComponentLost(f"start {n}") for n in range(10)])
    with pytest.raises(AgentRLError, match="died at each of 5 starts: start"):
        async with farm.open():
            pass
    farm = Farm([None, *(ComponentLost(f"start {n}") for n in range(6))])
    async with farm.open() as workers:
        assert len(farm.started) == 6, "the run begins without it"
        call = farm.play(workers, 0)
        await settle()
        farm.started[0].end(0)
        await call
        async with asyncio.timeout(60):
            while (await workers.figures())["workers/ready"] < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert len(farm.started) == 8, "it is started again as long as another worker is ready"


async def test_a_worker_that_cannot_close_is_named(caplog: pytest.LogCaptureFixture) -> None:
    farm = Farm()
    async with farm.open():
        farm.started[1].closing_fails = True
    assert [record.getMessage() for record in caplog.records] == ["rollout worker 1 did not close: it died"]


async def test_a_worker_that_starts_while_an_engine_is_away_is_started_again() -> None:
    farm = Farm([None, EngineUnreachable("it starts again", kind="engine_lost")])
    async with farm.open():
        assert len(farm.started) == 3


async def test_a_server_that_is_told_to_stop_ends_its_calls_and_closes_what_it_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    class Opened:
        @asynccontextmanager
        async def engines(self, urls: Sequence[str], follows: bool) -> AsyncIterator[EnginePool]:
            assert follows
            yield EnginePool(["http://a"], vocab_size=None)

        @asynccontextmanager
        async def worker(self, pool: EnginePool) -> AsyncIterator[object]:
            hooks = SimpleNamespace(begin=lambda step: said.append(f"rollout {step}"))
            yield SimpleNamespace(play=self.play, player=SimpleNamespace(context=SimpleNamespace(hooks=hooks)))
            said.append("closed")

        async def play(self, lease: Lease, report: object) -> Played:
            try:
                await asyncio.Event().wait()
            finally:
                said.append("call ended")
            raise AssertionError

    monkeypatch.setattr("agentrl.run.workers.Loaded.of", lambda settings: Opened())
    monkeypatch.setattr("agentrl.run.workers.freeze_loaded_objects", lambda: None)
    server = WorkerServer(RunSettings.from_flat({"rollout_workers": 2, "hf_checkpoint": "model"}), [])
    serving = asyncio.ensure_future(server.serve())
    with anyio.fail_after(5):
        await server.ready()
        await server.take_orders([Order(5, Lease(0, 0, 0, finished(0), 3))])
        await settle()
        await server.stop()
        await serving
    assert said == ["rollout 3", "call ended", "closed"]


async def test_a_call_that_is_cancelled_before_it_begins_is_answered_too() -> None:
    server = WorkerServer(RunSettings.from_flat({"rollout_workers": 2, "hf_checkpoint": "model"}), [])
    await server.take_orders([Order(5, Lease(0, 0, 0, finished(0))), Order(5, None)])
    with anyio.fail_after(5):
        assert [answer.call for answer in await server.answers()] == [5]


async def test_a_cancelled_call_ends_though_its_worker_does_not_confirm_it() -> None:
    farm = Farm()
    async with farm.open(engine_control_timeout=0.1) as workers:
        call = farm.play(workers, 0)
        await settle()
        call.cancel()
        ended, _ = await asyncio.wait([call], timeout=30)
        assert ended, "it waits for a worker that says nothing"
        assert [order.what for order in farm.started[0].orders[1:]] == [None]


async def test_errors_of_a_worker_are_raised_and_figures_are_added_up() -> None:
    farm = Farm()
    async with farm.open() as workers:
        call = farm.play(workers, 0)
        await settle()
        process = farm.started[0]
        process.messages.put_nowait(Answer(process.orders[0].call, error=PluginError("the reward raised")))
        with pytest.raises(PluginError, match="the reward raised"):
            await call
        found = await workers.figures()
    assert found["engines/in_flight"] == 6
    assert found["engines/prefix_cache_hit_rate"] == 0.5
    assert found["loop/busy_share"] >= 0.5
    assert (found["workers/ready"], found["engines/ready"]) == (2, 1)


def test_a_worker_has_its_share_of_trajectories_and_of_the_engines_places() -> None:
    many = {"rollout_workers": 3, "rollout_max_concurrency": 100, "sglang_server_concurrency": 64}
    own = share(RunSettings.from_flat({"hf_checkpoint": "model", **many}))
    assert own.rollout.rollout_max_concurrency == 34
    assert own.engine.sglang_server_concurrency == 22
