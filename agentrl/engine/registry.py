"""The members (engines) of a pool with their states: which of them get requests, and which weights they have. A member
is lost if a connection to it is refused or lost, or if it does not answer probes: its calls in flight fail. It gets
requests again after `regain` found or loaded the weights of `version`."""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import TypeVar

import anyio

from agentrl.engine.client import EngineClient
from agentrl.engine.load_balancer import LoadBalancer
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import HttpTransport, normalise_url
from agentrl.engine.weights import DiskUpdate
from agentrl.errors import EngineFailure, EngineRejected, EngineUnreachable, SettingsError

T = TypeVar("T")


class EngineRegistry(LoadBalancer[EngineClient]):
    """The members of a pool: `join` adds a member, `leave` removes it."""

    def __init__(self, transport: HttpTransport, settings: EngineSettings) -> None:
        super().__init__()
        self.version: str | None = None  # label of the current weights; None before the first update
        self.folder: DiskUpdate | None = None  # the current weights, if they were sent as a folder
        self.lost_at = 0.0  # when a member was last lost, on the event loop's clock
        self.counts: Counter[str] = Counter()  # counts of events and tokens, by name
        self.trouble = anyio.Event()  # set to probe all members at once
        self._transport, self._settings, self._changed = transport, settings, anyio.Event()

    def join(self, url: str) -> EngineClient:
        """Add a member and return it. After an update, a new member gets no requests until it has the weights."""
        url = normalise_url(url)
        if any(member.url == url for member in self.members):
            raise SettingsError(f"the engine at {url} is a member of this pool already")
        member = EngineClient(url, self._transport, self._settings)
        member.weights = "current" if self.version is None else "unknown"
        self.add(member)
        self._tell()
        return member

    def leave(self, url: str) -> None:
        """Remove a member; its requests go to other members."""
        if (member := next((m for m in self.members if m.url == normalise_url(url)), None)) is None:
            raise SettingsError(f"no engine of this pool has the address {url}; it has {[m.url for m in self.members]}")
        self.remove(member)
        member.break_off()

    def lost(self, member: EngineClient) -> None:
        """Mark a member as lost."""
        self.failed(member, anyio.current_time())
        if member.weights == "current":
            member.weights, self.lost_at = "unknown", anyio.current_time()
            self.counts["lost"] += 1
        member.break_off()  # also if it was lost before: it gets requests if no member is usable

    def mark_stale(self, member: EngineClient) -> None:
        """Mark a member as stale: it answered with other weights than the current ones."""
        self.failed(member, anyio.current_time())
        member.weights, self.lost_at = "stale", anyio.current_time()
        member.incarnation += 1
        self.trouble.set()

    def sent(self, version: str, folder: DiskUpdate | None, to: Collection[EngineClient]) -> None:
        """Record that these members have the new weights, and no other member has."""
        self.version, self.folder = version, folder
        for member in self.members:
            member.weights = "current" if member in to else "stale"
        self._tell()

    async def regain(self, member: EngineClient, *, follows: bool = False) -> None:
        """Recover a lost member that answers again. If it has other weights, it loads the current folder. If the
        current weights are not a folder, it stays stale until the next update. With `follows`, another pool
        loads the weights; this pool only checks for them. Raises EngineFailure: the member is lost again, or refuses the weights."""
        has = (await member.model_info()).get("weight_version")
        if self.version is not None and has != self.version:
            member.weights = "stale"
            if self.folder is None or follows:
                return
            await member.load_folder(self.folder, self.version)
        if not follows:
            await member.resume()  # the process that paused it may have ended
        member.weights = "current"
        self._tell()

    async def wait(self, seconds: float) -> None:
        """Wait until a member joins, recovers or gets weights, for at most this many seconds."""
        with anyio.move_on_after(seconds):
            await self._changed.wait()

    async def each(
        self, work: Callable[[EngineClient], Awaitable[T]], members: Iterable[EngineClient]
    ) -> tuple[dict[EngineClient, T], dict[EngineClient, EngineFailure]]:
        """Run `work` for these members concurrently; return the answers and the failures, by member."""
        answers: dict[EngineClient, T] = {}
        failures: dict[EngineClient, EngineFailure] = {}

        async def run(member: EngineClient) -> None:
            try:
                answers[member] = await work(member)
            except EngineFailure as error:
                failures[member] = error
                if not isinstance(error, EngineRejected):
                    self.lost(member)

        async with anyio.create_task_group() as group:
            for member in tuple(members):
                group.start_soon(run, member)
        return answers, failures

    async def all(self, work: Callable[[EngineClient], Awaitable[T]], members: Collection[EngineClient]) -> list[T]:
        """Run `work` for these members concurrently; return all answers, or raise the first failure at the end."""
        answers, failures = await self.each(work, members)
        if failures:
            raise next(iter(failures.values()))
        return [answers[member] for member in members]

    async def some(
        self, work: Callable[[EngineClient], Awaitable[T]], members: Iterable[EngineClient]
    ) -> dict[EngineClient, T]:
        """Run `work` for these members concurrently; return the answers that came. If none came, raise a failure."""
        answers, failures = await self.each(work, members)
        if not answers:
            raise next(iter(failures.values()), EngineUnreachable("the pool has no engine", kind="no_engine"))
        return answers

    def _tell(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
