"""`GraderRunner`: runs any grader by name, and opens resources once.

1. Graders that compute run in worker processes (`WorkerPool`). Graders that wait run on the event loop; their services
   open on first use and close with the runner.
2. `runner_for(args)` returns the runner of the enclosing rollout (`entered`), else one of the running event loop.
3. `grade_many` serves plain scripts: it uses worker processes, with a deadline for each answer."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from contextvars import ContextVar
from operator import length_hint
from typing import Any, Self, TypeVar

import anyio
from anyio.from_thread import start_blocking_portal
from anyio.lowlevel import RunVar
from pydantic import ValidationError

from agentrl.errors import AgentRLError, GraderFailure, SettingsError, ungrouped
from agentrl.rm_hub.grade import Grade, GraderService, Metadata
from agentrl.rm_hub.registry import GraderSpec, check_inputs, checked, find, raised
from agentrl.rm_hub.running.pool import WorkerPool
from agentrl.rm_hub.settings import RmHubSettings
from agentrl.settings import flag_of

T = TypeVar("T")

Item = tuple[str, Any] | tuple[str, Any, Mapping[str, Any]] | Mapping[str, Any]
"""`(response, label)`, `(response, label, metadata)`, or a mapping with those keys."""


class GraderRunner:
    """An async context manager that grades. `settings` are for pool and servers; `preload` are graders to load first.

    async with GraderRunner(RmHubSettings(grader_timeout=5)) as runner:
        grade = await runner.grade("math", r"So it is \\boxed{\\frac12}.", "0.5")"""

    def __init__(self, settings: RmHubSettings | None = None, *, preload: Sequence[str] = ()) -> None:
        self.settings = settings or RmHubSettings()
        self.pool = WorkerPool(self.settings)
        self._preload = [name for name in preload if find(name).runs == "process"]
        self._stack = AsyncExitStack()
        self._services: dict[str, GraderService] = {}
        self._opening = anyio.Lock()

    async def __aenter__(self) -> Self:
        try:
            await self.pool.load(self._preload)
        except BaseException:
            self.pool.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.pool.close()
        await self._stack.aclose()

    async def grade(self, rm_type: str, response: str, label: Any = None, metadata: Metadata | None = None) -> Grade:
        """Grade one answer. Raises SettingsError: the grader is unknown, or its setting is missing. GraderFailure:
        kinds `grader_raised`, `grader_unavailable`, `grader_closed`, the grader's own kinds, and by the rules of `pool`
        `grader_timeout`, `grader_crashed` and `grader_out_of_memory`."""
        spec, metadata = find(rm_type), metadata or {}
        if (too_long := check_inputs(rm_type, spec, response, label, metadata)) is not None:
            return too_long
        if spec.runs == "process":
            return await self.pool.grade(rm_type, spec, response, label, metadata)
        timeout = self.settings.grader_total_timeout
        try:
            with anyio.fail_after(timeout) as scope:
                function = await self._function(rm_type, spec)
                return checked(rm_type, await function(response, label, metadata))
        except TimeoutError as error:
            if not scope.cancelled_caught:
                raise raised(rm_type, error) from error
            said = f"--rm-type {rm_type}: no grade within {timeout:g} s (--grader-total-timeout)"
            raise GraderFailure(said, kind="grader_timeout") from error
        except AgentRLError:
            raise
        except Exception as error:
            raise raised(rm_type, error) from error

    async def _function(self, rm_type: str, spec: GraderSpec) -> Callable[..., Awaitable[Grade]]:
        """Return the grader's async function. A service is opened on first use."""
        if spec.runs == "async":
            function: Callable[..., Awaitable[Grade]] = spec.load()
            return function
        async with self._opening:
            if rm_type not in self._services:
                self._services[rm_type] = await self._stack.enter_async_context(spec.load()(self.settings))
        return self._services[rm_type].grade


_ENTERED: ContextVar[GraderRunner | None] = ContextVar("agentrl_grader_runner", default=None)
_OF_LOOP: RunVar[dict[RmHubSettings, GraderRunner]] = RunVar("agentrl_grader_runners")


@contextmanager
def entered(runner: GraderRunner | None) -> Iterator[None]:
    """Make `async_rm` use `runner` in this context and in the tasks that it starts. None changes nothing."""
    token = _ENTERED.set(runner or _ENTERED.get())
    try:
        yield
    finally:
        _ENTERED.reset(token)


def runner_for(args: Any) -> GraderRunner:
    """Return the runner for code with these `args`; see the module's second point."""
    if (runner := _ENTERED.get()) is not None:
        return runner
    runners = _OF_LOOP.get({})
    _OF_LOOP.set(runners)
    if (settings := settings_of(args)) not in runners:
        runners[settings] = GraderRunner(settings)
    return runners[settings]


def settings_of(args: Any) -> RmHubSettings:
    """Return the graders' settings: attributes of `args`, else defaults. Raises SettingsError: a value is invalid."""
    given = {name: getattr(args, name) for name in RmHubSettings.model_fields if hasattr(args, name)}
    try:
        return RmHubSettings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        raise SettingsError(f"{flag_of(str(first['loc'][0]))} {first['input']!r:.100}: {first['msg']}") from error


def grade_many(
    rm_type: str,
    items: Sequence[Item],
    *,
    processes: int | None = None,
    timeout: float = 10.0,
    settings: RmHubSettings | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Grade | GraderFailure]:
    """Grade answers in worker processes, also inside a running event loop. Returns a grade or the failure (not raised)
    of each item, in order. Raises SettingsError: the grader is unknown, or its setting is missing.

    Args:
        rm_type: a name of `graders()`, a `boxed_` form, or `path/to/file.py:function`.
        processes: worker processes; default one per core, at most 8.
        timeout: seconds one answer may take.
        settings: for graders that need more (`rm_url`, `judge_url`, ...); `processes` and `timeout` override it.
        progress: called after each answer with the number of finished answers."""
    own = (settings or RmHubSettings()).model_copy(update={"grader_processes": processes, "grader_timeout": timeout})
    rows: list[tuple[Any, ...]] = [
        (item["response"], item.get("label"), item.get("metadata")) if isinstance(item, Mapping) else item
        for item in items
    ]
    results: dict[int, Grade | GraderFailure] = {}

    async def grade_all() -> None:
        async with GraderRunner(own, preload=[rm_type]) as runner:

            async def one(at: int, row: tuple[Any, ...]) -> None:
                try:
                    results[at] = await runner.grade(rm_type, *row)
                except GraderFailure as failure:
                    results[at] = failure
                if progress is not None:
                    progress(len(results))

            await each(rows, one)

    # The event loop has its own thread, so that this works if a loop is running already (a notebook).
    with start_blocking_portal() as portal:
        portal.call(grade_all)
    return [results[at] for at in range(len(items))]


async def each(items: Iterable[T], work: Callable[[int, T], Awaitable[None]], at_once: int = 128) -> None:
    """Await `work(index, item)` for each item, at most `at_once` concurrently. The first error cancels the rest."""
    left = enumerate(items)

    async def run() -> None:
        for at, item in left:
            await work(at, item)

    with ungrouped():
        async with anyio.create_task_group() as group:
            for _ in range(min(at_once, length_hint(items, at_once))):
                group.start_soon(run)
