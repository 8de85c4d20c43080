"""Health of a pool's engines: probes, recovery of lost engines, and weight updates.

1. An engine that misses two probes in a row is lost: it gets no requests. If it answers again, it recovers
   (`EngineRegistry.regain`). An update cancels recoveries, because it updates these engines itself.
2. An engine whose HTTP server answers, but that generates nothing for `engine_hang_timeout`, is lost, too. It recovers
   when it generates again.
3. An update pauses the engines that answer, empties caches, writes weights, and resumes them, also after a failure.
4. Weights come as a folder, by broadcast or in shared memory. An engine that misses a folder loads it later; the update
   fails only if all engines miss it. Other updates fail if one engine misses them.
5. If no engine answers, an update waits up to `engine_absence_timeout` for the restart of an engine.
6. Pools of other processes may generate at the same engines. This pool tells them when to pause and when to resume."""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol, TypeVar

import anyio

from agentrl.engine.client import EngineClient
from agentrl.engine.pause import PauseGate
from agentrl.engine.registry import EngineRegistry
from agentrl.engine.requests import Requests
from agentrl.engine.settings import EngineSettings
from agentrl.engine.weights import WHOLE, BroadcastUpdate, DiskUpdate, Handles, SharedUpdate, WeightGroup, WeightUpdate
from agentrl.errors import EngineFailure, EngineRejected, EngineTimeout, EngineUnreachable
from agentrl.settings import shown

T = TypeVar("T")
_RESUME_TIMEOUT = 10.0
_MISSES = 2
_AGAIN = 0.2  # seconds between two attempts while no engine can be reached
_log = logging.getLogger(__name__)


class EngineFollower(Protocol):
    """Another process that generates at the engines of a pool."""

    async def hold(self, *, idle: bool, version: str | None = None) -> None:
        """Send no requests until `release`; then continue the requests that an update aborted. With `idle`, abort the
        requests in flight and return when none is left. `version`: label of the weights that an update brings."""

    async def release(self, version: str | None, folder: DiskUpdate | None) -> None:
        """Resume with the weights of this version. `folder` has these weights, if they were sent as a folder."""


class HealthMonitor:
    """The part of a pool that probes engines and updates their weights. Updates and recoveries never overlap."""

    def __init__(
        self, registry: EngineRegistry, settings: EngineSettings, vocab_size: int | None, follows: bool
    ) -> None:
        self.settings, self.follows = settings, follows
        self.pause_gate = PauseGate()  # closed while generation is paused, by `pause`, `hold` or an update
        self.followers: tuple[EngineFollower, ...] = ()  # other processes that generate at these engines
        self._registry, self._requests = registry, Requests(registry, self.pause_gate, settings, vocab_size)
        self._requests.shared = follows
        self._updating, self._memory, self._lock, self._blocks = False, WHOLE, anyio.Lock(), 0
        self._misses = Counter[EngineClient]()
        self._looking, self._trying, self._hung = (set[EngineClient]() for _ in range(3))
        self._regains: list[anyio.CancelScope] = []
        self._groups: dict[str, dict[EngineClient, int]] = {}
        self._offers, self._offered = anyio.create_memory_object_stream[tuple[str, Handles, anyio.Event]](0)

    async def _watch(self) -> None:
        """Probe all engines while the pool is open: after each probe interval, and at once if there is `trouble`."""
        async with anyio.create_task_group() as group:
            while True:
                with anyio.move_on_after(self.settings.engine_probe_interval):
                    await self._registry.trouble.wait()
                self._registry.trouble = anyio.Event()
                for member in set(self._registry.members) - self._looking:
                    self._looking.add(member)
                    group.start_soon(self._look_once, member)
                for member in set(self._registry.members) - self._trying if self.generates else ():
                    self._trying.add(member)
                    group.start_soon(self._try_once, member)

    async def _look_once(self, member: EngineClient) -> None:
        _, failures = await self._registry.each(self._look, [member])
        self._looking.discard(member)
        member.recovering = False
        if (said := str(failures.get(member, ""))) and said != member.unrecovered:
            _log.warning("%s answers, but cannot recover: %s", shown(member.url), said)
        member.unrecovered = said

    async def _look(self, member: EngineClient) -> None:
        """Probe one engine. Recover it if it answers after a loss; count a miss if it does not answer."""
        path = "/model_info" if self._updating else "/health"  # /health may fail while paused
        path = "/health_generate" if member in self._hung else path
        if await member.answers(path, self.settings.engine_probe_interval):
            del self._misses[member]
            self._hung.discard(member)
            if member.weights != "current" and not self._updating:
                with anyio.CancelScope() as scope:
                    self._regains.append(scope)
                    if not self.follows:
                        await member.set_resident_memory(self._memory)
                    if "weights" in self._memory:
                        member.recovering = True
                        await self._registry.regain(member, follows=self.follows)
        elif not self._updating or path != "/health":  # no miss if an update paused the engine after the probe began
            self._misses[member] += 1
            if self._misses[member] >= _MISSES:
                self._registry.lost(member)

    async def _try_once(self, member: EngineClient) -> None:
        """Mark an engine as lost if it generates nothing, unless an update paused it meanwhile."""
        blocks, limit = self._blocks, self.settings.engine_hang_timeout
        hangs = await member.hangs(limit)
        self._trying.discard(member)
        if hangs and blocks == self._blocks and member.weights == "current":
            url = shown(member.url)
            _log.warning("%s answers, but generated nothing for %g s (--engine-hang-timeout)", url, limit)
            self._hung.add(member)
            self._registry.lost(member)

    async def epoch(self) -> tuple[str, ...]:
        """Return the names of the engines that would take an update now, for a `WeightGroup`. An engine that was lost
        comes back under a new name. Raises EngineUnreachable: no engine answers."""
        return tuple(f"{member.url}#{member.incarnation}" for member in await self._answering())

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Have the group's engines join it; return when all ranks have joined, the trainer's included."""
        names = {f"{member.url}#{member.incarnation}": member for member in self._registry.members}
        if missing := [name for name in group.members if name not in names]:
            raise _broken(group.name, missing)
        ranks = {names[name]: 1 + i * group.ranks_per_engine for i, name in enumerate(group.members)}
        self._groups[group.name] = {member: member.incarnation for member in ranks}
        await self._registry.all(lambda member: member.join_group(group, ranks[member]), ranks)

    async def leave_weight_group(self, name: str) -> None:
        """Have the engines leave the group, except engines that were lost after they joined."""
        joined = self._groups.pop(name, {}).items()
        still = [member for member, incarnation in joined if member.incarnation == incarnation]
        await self._registry.all(lambda member: member.leave_group(name), still)

    async def receive(self, update: WeightUpdate, version: str) -> None:
        """Send the engines new weights with the label `version`. Generation then resumes, even if it was paused before.
        Unless the weights are a folder, the trainer must send its part at the same time. Raises EngineFailure: no
        engine took the folder, or an engine missed another kind of update (kind `weight_group_broken`: it was lost
        after it joined). Engines resume with their weights; an engine with incomplete weights gets no requests."""
        async with self._alone(version=version):
            if isinstance(update, BroadcastUpdate):
                await self._broadcast(update, version)
            elif isinstance(update, SharedUpdate):
                await self._take_shared(update, version)
            else:
                await self._load(update, version)

    @property
    def generates(self) -> bool:
        """True if neither an update nor freed memory keeps the engines from generating."""
        return not self._updating and self._memory == WHOLE

    @asynccontextmanager
    async def _alone(self, *, idle: bool = False, version: str | None = None) -> AsyncIterator[None]:
        """Pause requests and cancel recoveries inside the context. With `idle`, also abort the requests in flight."""
        async with self._lock:
            try:
                self._block()
                for follower in self.followers:
                    await follower.hold(idle=idle, version=version)
                if idle:
                    await self._requests.interrupt()
                yield
            finally:
                self._updating = False
                if self.generates:
                    self.pause_gate.open()
                    with anyio.CancelScope(shield=True):
                        for follower in self.followers:
                            await follower.release(self._registry.version, self._registry.folder)

    def _block(self) -> None:
        self._updating = True
        self._blocks += 1
        self.pause_gate.close()
        while self._regains:
            self._regains.pop().cancel()

    async def hold(self, *, idle: bool, version: str | None = None) -> None:
        """As a follower, send no requests until `release`; see `EngineFollower`."""
        self._block()
        if version is not None:  # engines resume before `release` is called
            self._requests.updated(version)
        if self.settings.pause_generation_mode == "abort":
            self._requests.mark_interrupted()
        if idle:
            await self._requests.interrupt()

    def release(self, version: str | None, folder: DiskUpdate | None) -> None:
        """As a follower, go on with the weights of this version."""
        if version is not None and version != self._registry.version:
            self._sent(version, folder, [m for m in self._registry.members if m.weights != "unknown"])
        self._updating = False
        self.pause_gate.open()

    async def set_resident_memory(self, memory: frozenset[str]) -> None:
        """Have the engines allocate these parts of their memory (`weights`, `kv_cache`) and free the others. Engines
        generate only while both parts are allocated. Calls in flight keep their tokens and continue afterwards. When
        freed weights are allocated again, the built-in engine restores their values. SGLang then needs an update.
        Raises EngineFailure: no engine answers, or one refuses: kinds `no_memory_saver`, `no_weights_backup`."""
        async with self._alone(idle=True):
            self._memory = memory
            there = await self._answering()
            _, failures = await self._registry.each(lambda member: member.set_resident_memory(memory), there)
            if refused := [failure for failure in failures.values() if isinstance(failure, EngineRejected)]:
                raise refused[0]

    async def lacks_weights(self) -> bool:
        """Return true if engines answer, but none has the current weights and no folder has them. This happens if all
        engines are restarted after a broadcast. The trainer must then send the weights again."""
        states = {member.weights for member in self._registry.members}
        return self._registry.folder is None and "stale" in states and "current" not in states

    async def _load(self, update: DiskUpdate, version: str) -> None:
        async def load(member: EngineClient) -> None:
            await member.load_folder(update, version, flush_cache=not self._frozen(member))

        async def load_all() -> None:
            async with self._paused(await self._answering_now()) as paused:
                took, failures = await self._registry.each(load, paused)
                if not took:
                    raise next(iter(failures.values()))
                _left_out(failures)
                self._sent(version, update, took)

        await self._patiently(load_all)

    async def _broadcast(self, update: BroadcastUpdate, version: str) -> None:
        names = {bucket.group for bucket in update.buckets}
        group = {member: incarnation for name in names for member, incarnation in self._groups[name].items()}
        if gone := [member.url for member, incarnation in group.items() if member.incarnation != incarnation]:
            raise _broken(", ".join(sorted(names)), gone)
        async with self._session(group, version):
            for number, bucket in enumerate(update.buckets, 1):
                label = _label(version, len(update.buckets) - number)
                await self._registry.all(partial(EngineClient.receive, bucket=bucket, version=label), group)

    async def offer(self, key: str, handles: Handles) -> None:
        """Offer a bucket to the `SharedUpdate` in progress; return when the engines have taken it."""
        taken = anyio.Event()
        await self._offers.send((key, handles, taken))
        await taken.wait()

    async def _take_shared(self, update: SharedUpdate, version: str) -> None:
        members, left = await self._answering(), update.buckets
        async with self._session(members, version):
            while left:
                try:
                    with anyio.fail_after(limit := self.settings.engine_control_timeout):
                        key, handles, taken = await self._offered.receive()
                except TimeoutError:
                    said = f"the trainer shared no weights for {limit:g} s (--engine-control-timeout)"
                    raise EngineTimeout(said) from None
                if key == update.key:  # a bucket with another key belongs to a failed update
                    own = dict(zip(self._registry.members, handles, strict=False))
                    left -= 1
                    await self._registry.all(partial(_take, own, _label(version, left)), members)
                taken.set()

    @asynccontextmanager
    async def _session(self, members: Collection[EngineClient], version: str) -> AsyncIterator[None]:
        """Pause the members inside the context. After it they have the weights of this version."""
        async with self._paused(members, strict=True):
            try:
                await self._registry.all(EngineClient.begin_update, members)
                yield
                await self._registry.all(EngineClient.end_update, members)
            except BaseException:
                for member in members:  # some tensors are old and some are new
                    member.weights = "stale"
                raise
            self._sent(version, None, members)

    def _sent(self, version: str, folder: DiskUpdate | None, to: Collection[EngineClient]) -> None:
        self._registry.sent(version, folder, to)
        self._requests.updated(version)

    @asynccontextmanager
    async def _paused(self, members: Iterable[EngineClient], strict: bool = False) -> AsyncIterator[list[EngineClient]]:
        """Pause the members with emptied caches; yield those for which this works. With `strict`, all must."""
        members, mode = list(members), self.settings.pause_generation_mode
        if mode == "abort":
            self._requests.mark_interrupted()

        async def pause(member: EngineClient) -> None:
            await member.set_resident_memory(self._memory)  # a lost engine missed the last such call
            await member.pause(mode)

        try:
            paused, failures = await self._registry.each(pause, members)
            to_flush = [member for member in paused if not self._frozen(member)]
            idle, more = await self._registry.each(EngineClient.flush_cache, to_flush)
            ready = [member for member in paused if member in idle or self._frozen(member)]
            failures |= more
            if failures and (strict or not ready):
                raise next(iter(failures.values()))
            _left_out(failures)
            yield ready
        except BaseException as error:
            # External engines outlive this process: an engine that stays paused would never answer again.
            with anyio.move_on_after(_RESUME_TIMEOUT, shield=True):
                for failure in (await self._registry.each(EngineClient.resume, members))[1].values():
                    error.add_note(f"an engine could not be resumed: {failure}")
            raise
        for member in (await self._registry.each(EngineClient.resume, members))[1]:
            self._registry.lost(member)

    def _frozen(self, member: EngineClient) -> bool:
        """Return true if this engine's cache must be kept: its requests wait and continue after the update."""
        busy = self.followers or any(call.member is member for call in self._requests.live.values())
        return bool(busy) and self.settings.pause_generation_mode == "in_place"

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`; while no engine is reachable (restarts), repeat for `engine_absence_timeout`."""
        began = anyio.current_time()
        while True:
            try:
                return await work()
            except EngineUnreachable as error:
                if error.kind == "no_engine" or anyio.current_time() - began >= self.settings.engine_absence_timeout:
                    raise
            await anyio.sleep(_AGAIN)

    async def _answering(self) -> list[EngineClient]:
        """Return the members that answer; if no member does, wait for the first. Raises EngineUnreachable: no member
        answered for `engine_absence_timeout`."""
        return await self._patiently(self._answering_now)

    async def _answering_now(self) -> list[EngineClient]:
        async def ask(member: EngineClient) -> None:
            for _ in range(0 if member in self._hung else _MISSES):
                if await member.answers("/model_info", self.settings.engine_probe_interval):
                    return
            raise EngineUnreachable(f"the engine at {member.url} does not answer", kind="engine_lost")

        there = await self._registry.some(ask, self._registry.members)
        return [member for member in self._registry.members if member in there]


def _left_out(failures: Mapping[EngineClient, EngineFailure]) -> None:
    said = "%s missed a weight update and gets no requests until it has the weights: %s"
    for member, failure in failures.items():
        _log.warning(said, shown(member.url), failure)


def _broken(name: str, who: Sequence[str]) -> EngineFailure:
    said = f"weight group {name} has lost {', '.join(who)}; make a new group"
    return EngineUnreachable(said, kind="weight_group_broken")


def _label(version: str, left: int) -> str:
    """Return the label that a bucket brings, before `left` more. An engine that misses the rest then has no version."""
    return f"{version}-incomplete" if left else version


def _take(handles: Mapping[EngineClient, Sequence[str]], version: str, member: EngineClient) -> Awaitable[None]:
    return member.receive_shared(handles[member], version)
