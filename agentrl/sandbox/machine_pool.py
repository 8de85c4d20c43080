"""`MachinePool`: machines that are started before they are needed."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import anyio

from agentrl.sandbox.limits import MachineLimits
from agentrl.sandbox.machine import DEFAULT_LIMITS, Machine
from agentrl.tasks import undone_by

M = TypeVar("M", bound=Machine)


class MachinePool(AbstractAsyncContextManager["MachinePool"]):
    """A pool of machines for the trajectories of one process. Each machine is for one caller, which closes it.

    async with MachinePool(warm=4) as pool, await pool.start(BubblewrapMachine, workdir="/app") as machine:
        await machine.run("true")

    After each call of `start`, `warm` machines wait in the pool, at least one of them with the arguments of this call.
    For that the pool closes the oldest machine with other arguments. With `warm=0` a machine starts when needed."""

    def __init__(self, warm: int = 0) -> None:
        self._warm = warm
        self._waiting: list[_Start] = []  # ready or still starting, the oldest first
        self._closing: set[asyncio.Task[None]] = set()

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def start(
        self,
        kind: type[M],
        image: str = "",
        *,
        limits: MachineLimits = DEFAULT_LIMITS,
        network: bool = False,
        workdir: str = "",
    ) -> M:
        """Return a machine that waits, or start one. Arguments and errors are those of `Machine.start`."""
        if not self._warm:
            return await kind.start(image, limits=limits, network=network, workdir=workdir)
        key = (kind, image, limits, network, workdir)
        self._waiting = [each for each in self._waiting if not each.failed]
        own = next((each for each in self._waiting if each.key == key), None) or _Start(*key)
        self._waiting = [each for each in self._waiting if each is not own]
        async with undone_by(own.close):
            machine: Any = await asyncio.shield(own.task)
        if (others := [each for each in self._waiting if each.key != key]) and len(self._waiting) == self._warm:
            self._waiting.remove(others[0])
            ending = asyncio.create_task(others[0].close())
            self._closing.add(ending)
            ending.add_done_callback(self._closing.discard)
        while len(self._waiting) < self._warm:
            self._waiting.append(_Start(*key))
        return machine  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Close the machines that wait. Later machines start when they are needed."""
        self._warm, waiting, self._waiting = 0, self._waiting, []
        with anyio.CancelScope(shield=True):
            await asyncio.gather(*self._closing, *(each.close() for each in waiting))


class _Start:
    """The start of a machine, in a task of its own."""

    def __init__(self, kind: type[Machine], image: str, limits: MachineLimits, network: bool, workdir: str) -> None:
        self.key = (kind, image, limits, network, workdir)
        self._scope = anyio.CancelScope()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> Machine | None:
        kind, image, limits, network, workdir = self.key
        with self._scope:
            return await kind.start(image, limits=limits, network=network, workdir=workdir)
        return None

    @property
    def failed(self) -> bool:
        return self.task.done() and self.task.exception() is not None

    async def close(self) -> None:
        """End the start, and close its machine if there is one."""
        self._scope.cancel()  # cancelling the task would break into shielded sections of the start
        with anyio.CancelScope(shield=True):
            await asyncio.wait([self.task])
            if not self.failed and (machine := self.task.result()) is not None:
                await machine.close()
