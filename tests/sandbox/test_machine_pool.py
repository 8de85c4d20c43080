"""Pools of machines: a machine for each caller, some spare ones, and no leftovers."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.sandbox import BubblewrapMachine, Machine, MachineLimits, MachinePool, SandboxFailure, SandboxUnavailable
from tests.sandbox.test_machines import place, refusal, traces
from tests.sandbox.watch import until

__all__ = ["place"]


@pytest.fixture(autouse=True)
def _works() -> None:
    if reason := refusal(BubblewrapMachine):
        pytest.skip(reason)


class Watched(BubblewrapMachine):
    """A bubblewrap machine that counts its starts. A start that begins while `gate` is set waits for it."""

    started = 0
    gate: anyio.Event | None = None

    async def _open(self, image: str, network: bool, workdir: str) -> None:
        gate = self.gate
        type(self).started += 1
        await super()._open(image, network, workdir)
        if gate is not None:
            await gate.wait()


@pytest.fixture
def kind() -> type[Watched]:
    return type("Fresh", (Watched,), {})


def machines(place: Path) -> int:
    return len(list(place.glob("agentrl-machine-*")))


async def test_each_caller_has_a_machine_of_its_own(kind: type[Watched], place: Path) -> None:
    before = traces(place)
    async with MachinePool(warm=2) as pool:
        held: list[Machine] = []
        for number in range(5):
            held.append(await pool.start(kind, workdir="/app"))
            assert (await held[-1].run(f"ls; echo {number} > file")).stdout == ""
        assert [await machine.read("/app/file") for machine in held] == [f"{number}\n".encode() for number in range(5)]
        for machine in held:
            await machine.close()
    await until(lambda: traces(place) == before)


async def test_a_waiting_machine_is_given_away_and_replaced(kind: type[Watched], place: Path) -> None:
    async with MachinePool(warm=1) as pool, await pool.start(kind):
        await until(lambda: kind.started == 2)
        kind.gate = anyio.Event()  # no further start ends
        async with await pool.start(kind) as second:
            assert (await second.run("echo on")).stdout == "on\n"
        await until(lambda: kind.started == 3)
    assert machines(place) == 0


async def test_other_limits_are_another_machine_and_the_oldest_makes_room(kind: type[Watched], place: Path) -> None:
    async with MachinePool(warm=1) as pool:
        await (await pool.start(kind)).close()
        async with await pool.start(kind, limits=MachineLimits(processes=7)) as other:
            assert other.limits.processes == 7
            await until(lambda: kind.started == 4 and machines(place) == 2)  # its own, and a spare of the same kind
        async with await pool.start(kind, limits=MachineLimits(processes=7)):
            await until(lambda: kind.started == 5)  # the spare was given away
    assert machines(place) == 0


async def test_without_warm_machines_each_start_is_the_callers(kind: type[Watched], place: Path) -> None:
    pool = MachinePool()
    async with await pool.start(kind):
        assert (kind.started, machines(place)) == (1, 1)


async def test_a_start_that_failed_is_not_given_away(kind: type[Watched], place: Path) -> None:
    image = place / "image"
    async with MachinePool(warm=1) as pool:
        with pytest.raises(SandboxFailure):
            await pool.start(kind, "/absent/image")
        image.mkdir()
        with pytest.raises((SandboxFailure, SandboxUnavailable)):  # it has no shell
            await pool.start(kind, str(image))
        async with await pool.start(kind) as machine:
            assert (await machine.run("true")).exit_code == 0
    assert machines(place) == 0


async def _cancelled(call: Callable[[], Coroutine[Any, Any, Machine]], ready: Callable[[], bool]) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await until(ready)
        tasks.cancel_scope.cancel()


async def test_a_cancelled_caller_and_a_closed_pool_leave_nothing(kind: type[Watched], place: Path) -> None:
    before, kind.gate = traces(place), anyio.Event()
    async with MachinePool(warm=2) as pool:
        await _cancelled(lambda: pool.start(kind), lambda: machines(place) == 1)
        await until(lambda: traces(place) == before)
        kind.gate = None
        async with await pool.start(kind):
            kind.gate = anyio.Event()
            await until(lambda: kind.started == 4)
    await until(lambda: traces(place) == before)
    kind.gate = None
    async with await pool.start(kind):
        assert kind.started == 5  # a closed pool starts no spares


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_1000_starts_leak_nothing(place: Path) -> None:
    """Every third caller is cancelled: while its machine starts, or while a command runs."""
    await (await BubblewrapMachine.start()).close()
    before = traces(place)

    async def play(number: int) -> None:
        async with limit:
            with anyio.move_on_after(0.02 * (number % 7) if number % 3 == 0 else None):
                async with await pool.start(BubblewrapMachine, workdir="/app") as machine:
                    assert (await machine.run(f"(sleep 1000 &); echo {number}; ls")).stdout == f"{number}\n"
                    if number % 3 == 0:
                        await machine.run("sleep 1000")

    limit = anyio.CapacityLimiter(4)
    async with MachinePool(warm=4) as pool, anyio.create_task_group() as tasks:
        for number in range(1000):
            tasks.start_soon(play, number)
    await until(lambda: traces(place) == before)
