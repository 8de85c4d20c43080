"""`Sandbox` and `SandboxSession`."""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Literal, Self

import anyio
import anyio.to_thread

from agentrl.errors import SandboxBusy, SandboxFailure, SandboxUnavailable, SettingsError, raised_as
from agentrl.sandbox.inside import frames
from agentrl.sandbox.launch import SAFE_BACKENDS, Backend, Zygote, start_zygote
from agentrl.sandbox.limits import RunResult, SandboxLimits
from agentrl.sandbox.process import NeverBegun, Process, check_confined, encode_request
from agentrl.tasks import undone_by

_LOST = "the session was restarted after: {}; earlier variables are gone"
_UNSAFE = "unsafe_subprocess: model-written code runs with this user's rights, files and network"
_DEFAULT_LIMITS = SandboxLimits()
BackendChoice = Literal["auto", "bubblewrap", "landlock", "unsafe_subprocess"]


class Sandbox:
    """Runs model-written Python where it can do no harm.

        async with Sandbox() as box:
            result = await box.run("print(6 * 7)")
            async with box.session() as session:
                await session.run("x = 41")
                print((await session.run("x + 1")).stdout)

    Args:
        backend: `auto` takes the first safe one that passes a trial on this machine.
        preload: modules that are imported once and are there without a wait; those not installed are left out.
        warm: how many confined processes wait for the next stateless run.
        max_concurrency: how many runs go on at once; more wait. Default: twice the processors.
        queue_seconds: how long a run waits for its turn before it is refused with `SandboxBusy`."""

    def __init__(
        self,
        backend: BackendChoice = "auto",
        *,
        limits: SandboxLimits = _DEFAULT_LIMITS,
        preload: tuple[str, ...] = ("sympy", "numpy"),
        warm: int = 2,
        max_concurrency: int | None = None,
        queue_seconds: float = 30.0,
    ) -> None:
        if backend not in ("auto", *SAFE_BACKENDS, "unsafe_subprocess"):
            raise SettingsError(f"backend {backend!r}: expected auto, {', '.join(SAFE_BACKENDS)} or unsafe_subprocess")
        if isinstance(preload, str):  # type: ignore[unreachable]
            raise SettingsError(f"sandbox preload: expected a tuple of module names, got {preload!r}")
        if warm < 0 or (max_concurrency is not None and max_concurrency < 1) or not queue_seconds > 0:
            raise SettingsError("sandbox: expected warm >= 0, max_concurrency >= 1 and queue_seconds > 0")
        self.limits = limits
        self._asked, self._preload, self._warm = backend, tuple(preload), warm
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._width = max_concurrency or 2 * processors
        self._queue_seconds = queue_seconds
        self._zygote: Zygote | None = None
        self._waiting: list[Process] = []

    async def __aenter__(self) -> Self:
        self._places, self._starting, self._asking = anyio.CapacityLimiter(self._width), anyio.Lock(), anyio.Lock()
        await self._choose()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._close_waiting()
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            with anyio.CancelScope(shield=True):
                await _close(zygote)

    @property
    def backend(self) -> Backend:
        return self._running().backend

    @property
    def python(self) -> str:
        """The interpreter that runs the code, and why it is not the caller's own where that is so."""
        interpreter = self._running().interpreter
        return f"{interpreter.executable} ({interpreter.note})" if interpreter.note else interpreter.executable

    async def run(self, code: str, *, stdin: str = "", timeout: float | None = None) -> RunResult:
        """Run a program in a process of its own; nothing of it survives. `timeout`: seconds, if less than
        `limits.wall_seconds`. Raises SandboxBusy: no place became free in time. SandboxFailure: the sandbox broke; the
        program may have run or not. SandboxInput: `stdin` cannot be given to a program."""
        try:
            return await SandboxSession(self, keeps=False)._run(code, stdin, timeout)
        finally:
            self._refill()

    def session(self) -> "SandboxSession":
        """A process whose variables stay from run to run: an async context manager, or to be closed with `close`."""
        return SandboxSession(self)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """A turn on the processor, in the order of asking."""
        self._running()
        try:
            with anyio.fail_after(self._queue_seconds):
                await self._places.acquire_on_behalf_of(place := object())
        except TimeoutError as error:
            said = f"no free place among {self._width} within {self._queue_seconds:g} s"
            remedy = "raise max_concurrency or queue_seconds, or run fewer programs at once"
            raise SandboxBusy(f"{said}; {remedy}") from error
        try:
            yield
        finally:
            self._places.release_on_behalf_of(place)

    async def _process(self, *, session: bool) -> Process:
        """A confined process that waits for code: a warm one, or a new one."""
        while self._waiting and not session:
            with contextlib.suppress(SandboxFailure):
                return await self._waiting.pop(0).ready()
        zygote = await self._alive()
        async with self._asking:
            while True:
                try:
                    process = zygote.spawn(self.limits, session=session)
                    break
                except BlockingIOError:  # many are being started
                    try:
                        await anyio.wait_writable(zygote.control)
                    except anyio.ClosedResourceError:
                        zygote = await self._alive()
        return await process.ready()

    def _refill(self) -> None:
        """Ask for processes ahead of the next calls; their readiness is waited for when they are used."""
        if (zygote := self._zygote) is None or not zygote.alive:
            return
        with contextlib.suppress(SandboxFailure, BlockingIOError):  # gone or behind: the next call sees to it
            while len(self._waiting) < self._warm:
                self._waiting.append(zygote.spawn(self.limits, session=False))

    async def _alive(self) -> Zygote:
        """Return the zygote; a new one if it died (for lack of memory, say). Other calls wait for the new one."""
        async with self._starting:
            if (zygote := self._running()).alive:
                return zygote
            self._close_waiting()
            await _close(zygote)
            what = "the sandbox ended and did not start again"
            with raised_as(SandboxFailure, what, SandboxUnavailable, NeverBegun, OSError):  # the next call tries again
                self._zygote = await self._start(zygote.backend)
            return self._zygote

    async def _choose(self) -> None:
        if self._asked == "unsafe_subprocess":
            warnings.warn(f"sandbox backend {_UNSAFE}", stacklevel=3)
        names: tuple[Backend, ...] = SAFE_BACKENDS if self._asked == "auto" else (self._asked,)
        refused: dict[str, Exception] = {}
        for name in names:
            try:
                self._zygote = await self._start(name)
                self._refill()
                return
            except (SandboxUnavailable, SandboxFailure) as error:
                refused[name] = error
        said = "; ".join(f"{name}: {error}" for name, error in refused.items())
        more = '`agentrl doctor` says more; backend="unsafe_subprocess" runs the code without protection'
        text = f"no sandbox for model-written code on this machine. {said}. {more}"
        raise SandboxUnavailable(text) from refused[names[-1]]

    async def _start(self, backend: Backend) -> Zygote:
        """Start a zygote and run the trial."""
        zygote = await start_zygote(backend, self._preload)
        async with undone_by(partial(_close, zygote)):
            if backend != "unsafe_subprocess":
                await check_confined(partial(self._trial_run, zygote))
        return zygote

    async def _trial_run(self, zygote: Zygote, code: str) -> RunResult:
        with contextlib.closing(await zygote.spawn(self.limits, session=False).ready()) as process:
            return await process.ask(encode_request(code, "", self.limits.wall_seconds), self.limits.wall_seconds)

    def _close_waiting(self) -> None:
        for child in self._waiting:
            child.close()
        self._waiting.clear()

    def _running(self) -> Zygote:
        if self._zygote is None:
            raise SandboxUnavailable("the sandbox is not open: use it inside `async with Sandbox(...) as box`")
        return self._zygote


async def _close(zygote: Zygote) -> None:
    anyio.notify_closing(zygote.control)  # wakes calls that wait to write to it
    await anyio.to_thread.run_sync(zygote.close)


class SandboxSession(AbstractAsyncContextManager["SandboxSession"]):
    """Runs that share their variables. After a crash or a timeout the next run starts with none, and says so."""

    def __init__(self, box: Sandbox, *, keeps: bool = True) -> None:
        self._box, self._keeps, self._turn = box, keeps, anyio.Lock()
        self._process: Process | None = None
        self._lost, self._closed = "", False

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(anyio.BusyResourceError):  # a run waits for its answer, and ends it then
                await process.end()

    async def run(self, code: str, *, timeout: float | None = None) -> RunResult:
        """Run a cell; runs asked for at once go one after another. Raises SandboxBusy: no place became free in time;
        the variables are kept. Raises SandboxFailure: the sandbox broke; the variables are lost."""
        return await self._run(code, "", timeout)

    async def _run(self, code: str, stdin: str, timeout: float | None) -> RunResult:
        if timeout is not None and not timeout > 0:
            raise SettingsError(f"sandbox timeout: expected a positive number of seconds, got {timeout!r}")
        wall = min(self._box.limits.wall_seconds, timeout or self._box.limits.wall_seconds)
        if len(request := encode_request(code, stdin, wall)) > frames.LARGEST:
            return RunResult("", f"the code is too long: {len(code)} characters\n", "error", None, 0.0)
        async with self._turn, self._box._place():
            for _ in range(3):
                if self._closed:
                    raise SandboxUnavailable("the session is closed: open another one with box.session()")
                had_run = self._process is not None
                process = self._process = self._process or await self._box._process(session=self._keeps)
                note, self._lost = self._lost, _LOST.format("cancelled")
                try:
                    result = await process.ask(request, wall)
                    self._lost = _LOST.format(result.outcome) if process.ended else ""
                    return dataclasses.replace(result, note=note)
                except NeverBegun:
                    self._lost = _LOST.format("its process ended between two runs") if had_run else note
                finally:
                    if self._lost or process.ended:
                        self._process = None
                        await process.end()
            raise SandboxFailure("three processes in a row ended before the code reached them")


def try_backends() -> dict[Backend, tuple[bool, str]]:
    """For every safe backend, the preferred one first: whether it works here, and which Python it runs or why not.
    Takes about a second, in an event loop of its own."""

    async def tried() -> dict[Backend, tuple[bool, str]]:
        found: dict[Backend, tuple[bool, str]] = {}
        for name in SAFE_BACKENDS:
            try:
                async with Sandbox(name, preload=(), warm=0) as box:
                    found[name] = True, box.python
            except (SandboxUnavailable, SandboxFailure) as error:
                found[name] = False, str(error.__cause__ or error)
        return found

    return anyio.run(tried)
