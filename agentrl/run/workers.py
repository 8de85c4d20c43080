"""Rollout workers in separate processes: `WorkerServer` runs in each, `RolloutWorkers` in the coordinator's process.

1. A worker has all that generation needs: tokenizer, environments, graders, gateway, engine connections. It gets
   its share of `--rollout-max-concurrency` and of the engines' slots. `setup` and limits of tools are per worker.
2. Messages are sent in batches. Messages that collect while a batch is being sent form the next batch.
3. A worker that dies is replaced. Its calls raise `WorkerLost`: the coordinator releases their groups in the ledger,
   and evaluation groups are generated again. Late answers to a lost call are discarded.
4. Workers follow the coordinator's pool (`EngineFollower`). One that pauses after `engine_control_timeout` is replaced.
5. `agentrl.cluster.workers` has the processes, as Ray actors."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeVar

import anyio

from agentrl.buffer.codec import decode_group, encode_group
from agentrl.clock import Watchdog, freeze_loaded_objects
from agentrl.config import RunSettings
from agentrl.engine.health import EngineFollower
from agentrl.engine.pool import EnginePool as EnginePool
from agentrl.engine.weights import DiskUpdate
from agentrl.errors import AgentRLError, EngineFailure, ungrouped
from agentrl.groups import Group
from agentrl.rollout.coordinator import LOST, MAX_LOSSES
from agentrl.rollout.failures import DropGroup
from agentrl.rollout.stats import RolloutStats, Tally
from agentrl.rollout.worker import Lease, LeaseProgress, Played, WorkerLost
from agentrl.rollout.worker import Player as Player
from agentrl.run.protocols import ComponentLost
from agentrl.run.rollouts import Loaded

T = TypeVar("T")
_log = logging.getLogger(__name__)
_GATHER = 0.05
"""Mean seconds from one worker's batch of answers to the next worker's. A batch costs the coordinator a millisecond."""
_CLOSE_TIMEOUT = 10.0
"""Seconds that a worker has to end its trajectories and to close environments and graders at the end of a run."""
_ATTEMPTS = 5
"""The run ends after this many failed starts of a worker in a row, if no other worker is ready."""


class Order(NamedTuple):
    """A call to a worker. `what`: a `Lease`, a group of evaluation set `set_number`, or None to cancel the call."""

    call: int
    what: Lease | Group | None
    set_number: int = -1


class Answer(NamedTuple):
    """The end of a call: its result, or the reason why its group was dropped, or an error, or nothing if cancelled."""

    call: int
    result: Played | bytes | None = None
    stats: RolloutStats | None = None
    dropped: str = ""
    error: AgentRLError | None = None


class CallProgress(NamedTuple):
    """Progress of a call."""

    call: int
    progress: LeaseProgress


@dataclass(frozen=True, slots=True)
class EngineView:
    """The workers' view of the engines. `held`: the reason why engines do not generate, or ""."""

    version: str | None = None
    folder: DiskUpdate | None = None
    held: str = ""
    coming: str | None = None  # the version that an update brings


class RolloutProcess(Protocol):
    """A worker as `RolloutWorkers` calls it. Every call raises `ComponentLost` once the process is gone."""

    async def serve(self) -> None:
        """Open everything, generate until `stop`, and close everything. Raises AgentRLError: opening failed."""

    async def ready(self) -> None:
        """Return when everything is open."""

    async def follow(self, view: EngineView) -> None:
        """Pause requests, or continue with the weights of `view`."""

    async def figures(self) -> Mapping[str, float]:
        """Return the worker's metrics since the last call."""

    async def take_orders(self, orders: Sequence[Order]) -> None:
        """Begin or cancel calls."""

    async def answers(self) -> "list[CallProgress | Answer]":
        """Wait for messages and return them: the last report of each call, then answers."""

    async def stop(self) -> None:
        """Make `serve` return."""

    def kill(self) -> None:
        """End the process."""


class WorkerServer:
    """The server in a worker's process. `take_orders` begins calls of `RolloutProcess`, `answers` returns results."""

    def __init__(self, settings: RunSettings, urls: Sequence[str]) -> None:
        self._settings, self._urls = settings, urls
        self._ready, self._news, self._idle, self._end = (asyncio.Event() for _ in range(4))
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._reports: dict[int, CallProgress] = {}
        self._answers: list[Answer] = []

    async def serve(self) -> None:
        loaded = Loaded.of(self._settings)
        async with loaded.engines(self._urls, follows=True) as pool, loaded.worker(pool) as self._worker:
            assert isinstance(pool, EnginePool)
            self._pool = pool
            freeze_loaded_objects()
            self._ready.set()
            await self._end.wait()
            for call in self._calls.values():
                call.cancel()
            await asyncio.gather(*self._calls.values(), return_exceptions=True)

    async def stop(self) -> None:
        self._end.set()

    async def ready(self) -> None:
        await self._ready.wait()

    async def follow(self, view: EngineView) -> None:
        if view.held == "rollout":
            await self._pool.pause()
        elif view.held:
            await self._pool.hold(idle=view.held == "idle", version=view.coming)
        else:
            self._pool.release(view.version, view.folder)

    async def figures(self) -> Mapping[str, float]:
        return await self._worker.figures()

    async def take_orders(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if order.what is not None:
                self._idle.clear()
                self._calls[order.call] = asyncio.ensure_future(self._play(order))
            elif order.call in self._calls:
                await asyncio.sleep(0)  # a task that is cancelled before it begins would give no answer
                if task := self._calls.get(order.call):
                    task.cancel()

    async def answers(self) -> list[CallProgress | Answer]:
        await self._news.wait()
        with anyio.move_on_after(_GATHER * self._settings.cluster.rollout_workers):
            await self._idle.wait()  # without calls in flight there is nothing to wait for
        found: list[CallProgress | Answer] = [*self._reports.values(), *self._answers]
        self._reports, self._answers = {}, []
        self._news.clear()
        return found

    async def _play(self, order: Order) -> None:
        answer = Answer(order.call)
        try:
            if isinstance(order.what, Lease):
                answer = Answer(order.call, await self._lease(order.call, order.what))
            else:
                assert order.what is not None
                answer = await self._evaluate(order, order.what)
        except AgentRLError as error:
            answer = Answer(order.call, error=error)
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - the coordinator raises it
            answer = Answer(order.call, error=AgentRLError(f"a rollout worker: {type(error).__name__}: {error}"))
        finally:
            del self._calls[order.call]
            self._answers.append(answer)
            self._news.set()
            if not self._calls:
                self._idle.set()

    async def _lease(self, call: int, lease: Lease) -> Played:
        def report(progress: LeaseProgress) -> None:
            self._reports[call] = CallProgress(call, progress)
            self._news.set()

        self._worker.player.context.hooks.begin(lease.step)
        played = await self._worker.play(lease, report)
        # The group is sent as the ledger stores it: encoded. A dropped group is sent too, for the viewer.
        return replace(played, group=[], data=played.data or (encode_group(played.group) if played.group else b""))

    async def _evaluate(self, order: Order, group: Group) -> Answer:
        tally = Tally()
        try:
            graded = await self._worker.evaluate(order.set_number, group, tally)
        except DropGroup as drop:
            return Answer(order.call, None, tally.stats, drop.reason)
        return Answer(order.call, encode_group(graded), tally.stats)


StartWorker = Callable[[int], RolloutProcess]
"""Starts the process of worker number n."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call under way, with `weight` trajectories. `answer`: None until the call ends, or if its worker is lost."""

    weight: int
    report: Callable[[LeaseProgress], None] = lambda progress: None
    ended: anyio.Event = field(default_factory=anyio.Event)
    answer: Answer | None = None


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker's process as `RolloutWorkers` sees it."""

    process: RolloutProcess
    calls: dict[int, _Call] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    ordered: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def busy(self) -> int:
        """Trajectories of the calls under way."""
        return sum(call.weight for call in self.calls.values())

    def send(self, order: Order) -> None:
        self.orders.append(order)
        self.ordered.set()

    def receive(self, messages: Sequence[CallProgress | Answer]) -> None:
        for message in messages:
            if (call := self.calls.get(message.call)) is None:
                continue
            if isinstance(message, CallProgress):
                call.report(message.progress)
            else:
                del self.calls[message.call]
                call.answer = message
                call.ended.set()

    def end(self) -> None:
        """Fail all calls: the process is gone."""
        self.lost.set()
        for call in self.calls.values():
            call.ended.set()
        self.calls.clear()


class RolloutWorkers(Player, EngineFollower):
    """Workers in processes of their own; made by `open`."""

    def __init__(self, settings: RunSettings, start: StartWorker, pool: EnginePool, watchdog: Watchdog) -> None:
        self._settings, self._start, self._pool, self._watchdog = settings, start, pool, watchdog
        self._workers: dict[int, _Worker] = {}
        self._view, self._numbers, self._changed = EngineView(), count(), anyio.Event()
        self._given_up: set[int] = set()  # the run begins without these workers; their starts are retried

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: RunSettings, start: StartWorker, pool: EnginePool) -> "AsyncIterator[RolloutWorkers]":
        """Start the workers with `start`, and end them with the block. Raises AgentRLError: a worker could not open
        (user code failed, for example), or died at each start."""
        with Watchdog.watching(settings.rollout.event_loop_block_warning) as watchdog, ungrouped():
            async with anyio.create_task_group() as tasks:
                workers = cls(settings, start, pool, watchdog)
                pool.followers = (workers,)
                for number in range(settings.cluster.rollout_workers):
                    tasks.start_soon(workers._keep, number)
                try:
                    while len(workers._given_up | workers._workers.keys()) < settings.cluster.rollout_workers:
                        await workers._changed.wait()
                    yield workers
                finally:
                    pool.followers = ()
                    tasks.cancel_scope.cancel()

    # ---- what the coordinator calls -------------------------------------------------------------------------

    async def play(self, lease: Lease, report: Callable[[LeaseProgress], None]) -> Played:
        played = (await self._ask(Order(next(self._numbers), lease), _Call(len(lease.group), report))).result
        assert isinstance(played, Played)
        if played.verdict.keep or not played.data:
            return played
        group = decode_group(played.data, f"group {lease.group_id}")
        return replace(played, group=group, data=played.data if played.verdict.keep_when_insufficient else b"")

    async def evaluate(self, number: int, group: Group, tally: Tally) -> Group:
        for _ in range(MAX_LOSSES):
            with suppress(WorkerLost):
                answer = await self._ask(Order(next(self._numbers), group, number), _Call(len(group)))
                tally.stats += answer.stats or RolloutStats()
                if answer.dropped:
                    raise DropGroup(answer.dropped)
                assert isinstance(answer.result, bytes)
                return decode_group(answer.result, "a group of an evaluation")
        raise DropGroup(LOST)

    async def pause(self) -> None:
        await self._tell(replace(self._view, held="rollout"))

    async def resume(self) -> None:
        if self._pool.generates:
            await self._tell(replace(self._view, held=""))

    async def updated(self, version: int) -> None:
        """Do nothing: `release` has told the workers."""

    async def figures(self) -> Mapping[str, float]:
        """Return each metric's sum over the workers; for event loops the maximum, for rates the mean."""
        own = self._pool.figures()
        asked = [self._reached(worker, worker.process.figures()) for worker in self._workers.values()]
        told = [one for one in await asyncio.gather(*asked) if one is not None]
        loops = [*told, self._watchdog.take()]
        found: dict[str, float] = {}
        for name in dict.fromkeys(name for one in loops for name in one):
            values = [one[name] for one in loops if name in one]
            if name.startswith("loop/"):
                found[name] = max(values)
            elif name.endswith("_rate"):
                found[name] = sum(values) / len(values)
            else:
                found[name] = sum(values)
        lost = own["engines/lost"]
        return found | {"engines/ready": own["engines/ready"], "engines/lost": lost, "workers/ready": float(len(told))}

    # ---- what the engines' pool calls -----------------------------------------------------------------------

    async def hold(self, *, idle: bool, version: str | None = None) -> None:
        await self._tell(replace(self._view, held="idle" if idle else "update", coming=version))

    async def release(self, version: str | None, folder: DiskUpdate | None) -> None:
        await self._tell(EngineView(version, folder))

    async def _tell(self, view: EngineView) -> None:
        """Have all workers follow `view`; replace a worker that does not within `engine_control_timeout`."""
        self._view = view
        workers = tuple(self._workers.values())
        await asyncio.gather(*(self._reached(worker, worker.process.follow(view)) for worker in workers))

    async def _reached(self, worker: _Worker, call: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of a call; None if the worker is lost. A worker that does not answer in time is lost."""
        try:
            with anyio.fail_after(self._settings.engine.engine_control_timeout):
                return await call
        except (ComponentLost, TimeoutError):
            worker.lost.set()
            return None

    # ---- calls ----------------------------------------------------------------------------------------------

    async def _ask(self, order: Order, call: _Call) -> Answer:
        """Return the answer of the least busy worker. A cancelled call ends when its worker confirms, or after a timeout."""
        while not self._workers:
            await self._changed.wait()
        worker = min(self._workers.values(), key=lambda one: one.busy)
        worker.calls[order.call] = call
        worker.send(order)
        try:
            await call.ended.wait()
        except BaseException:
            worker.send(Order(order.call, None))
            with anyio.move_on_after(self._settings.engine.engine_control_timeout, shield=True):
                await call.ended.wait()
            worker.calls.pop(order.call, None)
            raise
        if call.answer is None:
            raise WorkerLost("a rollout worker died")
        if call.answer.error is not None:
            raise call.answer.error
        return call.answer

    # ---- processes ------------------------------------------------------------------------------------------

    async def _keep(self, number: int) -> None:
        """Run worker `number`, and start it again when it dies."""
        failed = 0
        while True:
            await anyio.sleep(min(0.01 * 2 ** min(failed, 13) - 0.01, 60.0))
            worker = _Worker(self._start(number))
            serving = asyncio.ensure_future(worker.process.serve())
            try:
                with anyio.fail_after(self._settings.cluster.start_timeout):
                    await _first(serving, worker.process.ready())
                    seen = None
                    while seen is not self._view:  # the view may change during the call
                        seen = self._view
                        await worker.process.follow(seen)
                failed = 0
                self._workers[number] = worker
                self._notify()
                await _first(serving, self._send(worker), self._receive(worker), worker.lost.wait())
                raise ComponentLost("it does not answer")
            except (ComponentLost, TimeoutError, EngineFailure) as error:  # EngineFailure: an engine may be restarting
                failed += number not in self._workers
                if failed >= _ATTEMPTS and not self._workers:
                    raise AgentRLError(f"rollout worker {number} died at each of {failed} starts: {error}") from None
                _log.warning("rollout worker %d is lost and is replaced: %s", number, error)
                if failed >= _ATTEMPTS:
                    self._given_up.add(number)
                    self._notify()
            except anyio.get_cancelled_exc_class():
                if number in self._workers:
                    await _close(number, worker.process, serving)
                raise
            finally:
                self._workers.pop(number, None)
                worker.end()
                worker.process.kill()
                serving.cancel()

    async def _send(self, worker: _Worker) -> None:
        while True:
            await worker.ordered.wait()
            worker.ordered.clear()
            orders, worker.orders = worker.orders, []
            await worker.process.take_orders(orders)

    async def _receive(self, worker: _Worker) -> None:
        while True:
            worker.receive(await worker.process.answers())

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


async def _close(number: int, process: RolloutProcess, serving: "asyncio.Future[None]") -> None:
    """Have a worker's process end its trajectories and close what the user's code opened."""
    try:
        with anyio.fail_after(_CLOSE_TIMEOUT, shield=True):
            await process.stop()
            await serving
    except (AgentRLError, TimeoutError) as error:
        _log.warning(
            "rollout worker %d did not close: %s", number, str(error) or f"it took over {_CLOSE_TIMEOUT:.0f} s"
        )


async def _first(lasting: "asyncio.Future[None]", *awaited: Coroutine[Any, Any, Any]) -> None:
    """Return when `lasting` or an `awaited` ends; raise its error, if any. Cancel the other `awaited`."""
    tasks = [lasting, *map(asyncio.ensure_future, awaited)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)


def share(settings: RunSettings) -> RunSettings:
    """Return the settings of one worker, with its share of trajectories and of the engines' slots."""
    workers = settings.cluster.rollout_workers
    numbers = (settings.rollout.rollout_max_concurrency, settings.engine.sglang_server_concurrency)
    trajectories, places = (-(-number // workers) for number in numbers)
    return settings.replace(rollout_max_concurrency=trajectories, sglang_server_concurrency=places)
