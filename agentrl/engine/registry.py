"""The members of a pool and what is known of each: who may be sent requests, and who has which weights. A member is out
of reach when a connection to it is refused or lost, or when it does not answer probes: its calls are broken off, and it
gets no more until a probe finds it back with the weights of `version` (`regain`)."""

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
    """Members come by `join` and go by `leave`, in any number."""

    def __init__(self, transport: HttpTransport, settings: EngineSettings) -> None:
        super().__init__()
        self.version: str | None = None  # label of the weights that are sampled from; None before the first update
        self.folder: DiskUpdate | None = None  # these weights, if they were sent as a folder
        self.lost_at = 0.0  # when a member was last lost, on the event loop's clock
        self.counts: Counter[str] = Counter()  # what happened, by name
        self.trouble = anyio.Event()  # set when a member should be looked at before the next probe
        self._transport, self._settings, self._changed = transport, settings, anyio.Event()

    def join(self, url: str) -> EngineClient:
        """A new member; when weights were sent before, it must have them before it gets requests."""
        url = normalise_url(url)
        if any(member.url == url for member in self.members):
            raise SettingsError(f"the engine at {url} is a member of this pool already")
        member = EngineClient(url, self._transport, self._settings)
        member.weights = "current" if self.version is None else "unknown"
        self.add(member)
        self._tell()
        return member

    def leave(self, url: str) -> None:
        """Forget a member; its requests go elsewhere."""
        if (member := next((m for m in self.members if m.url == normalise_url(url)), None)) is None:
            raise SettingsError(f"no engine of this pool has the address {url}; it has {[m.url for m in self.members]}")
        self.remove(member)
        member.break_off()

    def lost(self, member: EngineClient) -> None:
        """It is out of reach."""
        self.failed(member, anyio.current_time())
        if member.weights == "current":
            member.weights, self.lost_at = "unknown", anyio.current_time()
            self.counts["lost"] += 1
        member.break_off()  # also if it was lost before: where nobody is left, it has requests

    def has_stale_weights(self, member: EngineClient) -> None:
        """It has other weights than it should."""
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
        """Bring a member that answers again back to work. One with other weights loads the last folder that was sent;
        if weights do not travel that way, it waits for the next update. With `follows`, another pool does all this, and
        this one waits until the member has the weights. Raises EngineFailure: it went away again, or refused them."""
        has = (await member.model_info()).get("weight_version")
        if self.version is not None and has != self.version:
            member.weights = "stale"
            if self.folder is None or follows:
                return
            await member.load_folder(self.folder, self.version)
        if not follows:
            await member.resume()  # whoever paused it may have gone
        member.weights = "current"
        self._tell()

    async def wait(self, seconds: float) -> None:
        """Return when a member came back or joined, at the latest after so many seconds."""
        with anyio.move_on_after(seconds):
            await self._changed.wait()

    async def each(
        self, work: Callable[[EngineClient], Awaitable[T]], members: Iterable[EngineClient]
    ) -> tuple[dict[EngineClient, T], dict[EngineClient, EngineFailure]]:
        """Run `work` for these members at once; return the answers of some and the failures of the others."""
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
        """`work` for these members at once; the first failure is raised when all are through."""
        answers, failures = await self.each(work, members)
        if failures:
            raise next(iter(failures.values()))
        return [answers[member] for member in members]

    async def some(
        self, work: Callable[[EngineClient], Awaitable[T]], members: Iterable[EngineClient]
    ) -> dict[EngineClient, T]:
        """Run `work` for these members at once; return the answers of some. Raises the first failure if none answers."""
        answers, failures = await self.each(work, members)
        if not answers:
            raise next(iter(failures.values()), EngineUnreachable("the pool has no engine", kind="no_engine"))
        return answers

    def _tell(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
