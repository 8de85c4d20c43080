"""Resources of environment classes that all trajectories of a process share."""

from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from agentrl.envs import EnvSpec
from agentrl.errors import EnvFailure
from agentrl.rollout.failures import guarded


@asynccontextmanager
async def set_up(entries: Iterable[EnvSpec], timeout: float) -> AsyncIterator[None]:
    """Open tool sources and call `setup`, once per class; undo both at the end. `timeout`: seconds for each call."""
    classes = {entry.kind: entry for entry in entries}
    sources = {id(source): (source, kind) for kind in classes for source in kind.tool_sources()}
    async with AsyncExitStack() as stack:
        for source, kind in sources.values():
            stack.push_async_callback(source.close)
            await _call(source.open(), f"{kind.__name__}.tools", timeout)
        for entry in classes.values():
            await stack.enter_async_context(_set_up(entry, timeout))
        yield


@asynccontextmanager
async def _set_up(entry: EnvSpec, timeout: float) -> AsyncIterator[None]:
    kind = entry.kind
    await _call(kind.setup(entry.args), f"{kind.__name__}.setup", timeout)
    try:
        yield
    except BaseException as error:
        try:
            await _call(kind.teardown(), f"{kind.__name__}.teardown", timeout)
        except EnvFailure as failure:
            error.add_note(str(failure))
        raise
    await _call(kind.teardown(), f"{kind.__name__}.teardown", timeout)


async def _call(hook: Awaitable[None], what: str, timeout: float) -> None:
    await guarded(hook, what=what, timeout=timeout, failure=EnvFailure)
