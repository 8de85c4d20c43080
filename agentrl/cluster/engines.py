"""A run's engines on Ray: an actor on each machine of an engine."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import ray

from agentrl.cluster.runtime import enter_workspace, node_address, value, values
from agentrl.config import RunSettings
from agentrl.errors import AgentRLError
from agentrl.run import deltas
from agentrl.run.engines import EngineNode, serve_one
from agentrl.run.training import free_port
from agentrl.tasks import together

_STOP_TIMEOUT = 15.0
_log = logging.getLogger(__name__)


@ray.remote
class EngineActor:
    """Starts one inference server, or one machine's part of it, on its node and stops it when the actor ends."""

    def __init__(self, settings: RunSettings, workspace: str) -> None:
        enter_workspace(workspace)
        self._settings, self._stack = settings, ExitStack()

    def address(self) -> str:
        """Return an address of this machine for the rendezvous of an engine's machines."""
        return f"{node_address(self._settings)}:{free_port()}"

    def start(
        self, index: int, logs: Path, gpus: Sequence[str] | None = None, node: EngineNode | None = None
    ) -> tuple[str, int | None]:
        """Start the server; return its URL and process id. `gpus`: GPUs of trainer processes to use."""
        own, address = self._settings.engine.engine_host, node_address(self._settings)
        host = own if address == "127.0.0.1" else address
        process = self._stack.enter_context(serve_one(self._settings, index, logs, host=host, gpus=gpus, node=node))
        return process.url, process.pid

    def fetch(self, version: Path, into: Path, name: str, base: str | None) -> None:
        """Make a copy of weights on this machine; see `deltas.fetch`."""
        deltas.fetch(version, into, name, base)

    def stop(self) -> None:
        self._stack.close()


async def start_engine(actors: list[Any], index: int, logs: Path, gpus: Sequence[str] | None) -> tuple[str, list[int]]:
    """Start engine `index` with the actors of its machines; return its address and the process ids. `gpus`: GPUs
    of trainer processes to use, in the order of the machines; None: the engine has its own."""
    count, share = len(actors), len(gpus or ()) // len(actors)
    meeting: str | None = await value(actors[0].address.remote()) if count > 1 else None
    starting = []
    for rank, actor in enumerate(actors):
        own = None if gpus is None else gpus[rank * share : (rank + 1) * share]
        starting.append(actor.start.remote(index, logs, own, meeting and EngineNode(rank, count, meeting)))
    found = await values(starting)
    return found[0][0], [pid for _, pid in found]


async def fetch(actors: Sequence[Any], version: Path, into: Path, name: str, base: str | None) -> None:
    """Have every machine make a copy. Raises AgentRLError: all machines failed."""
    failures = []

    async def one(actor: Any) -> None:
        try:
            await value(actor.fetch.remote(version, into, name, base))
        except AgentRLError as error:
            failures.append(error)
            _log.warning("a machine with an engine has no copy of the weights in %s: %s", into, error)

    await together(*(partial(one, actor) for actor in actors))
    if failures and len(failures) == len(actors):
        raise failures[0]


async def stop_engines(actors: Sequence[Any]) -> None:
    """Stop the engines, also if some have died."""
    with anyio.move_on_after(_STOP_TIMEOUT, shield=True):
        await asyncio.gather(*(value(actor.stop.remote()) for actor in actors), return_exceptions=True)
