"""Cost of a run in the sandbox, beside starting a bare interpreter (the floor) in the same minute.

    python -m benchmarks.sandbox

Prints milliseconds (p50, p99) of stateless programs and of a session's cells, one after another, for each backend that
works here, with sympy and numpy preloaded; then the results of 64 programs that are started at once.
"""

import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Awaitable, Callable

import anyio

from agentrl.sandbox import RunResult, Sandbox, SandboxBusy, SandboxLimits, SandboxUnavailable
from agentrl.sandbox.interpreter import find_interpreter

RUNS = 200
AT_ONCE = 64
DEADLINE = 10.0
QUEUE = 5.0
PROGRAM = "print(sum(range(100)))"
HEAVIER = "import sympy; x = sympy.Symbol('x'); print(sympy.factor(x**6 - 1))"


async def timed(action: Callable[[], Awaitable[object]], runs: int = RUNS) -> list[float]:
    """Return the milliseconds of each run, in ascending order."""
    for _ in range(3):
        await action()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        await action()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)


def right(run: Callable[[], Awaitable[RunResult]], expected: str = "") -> Callable[[], Awaitable[object]]:
    """Wrap a run so that it raises SystemExit if it fails or prints something else: a failure is no valid time."""

    async def checked() -> None:
        result = await run()
        if not result.ok or (expected and result.stdout != expected):
            raise SystemExit(f"a run in the sandbox failed: {result}")

    return checked


def row(name: str, times: list[float], floor: float) -> None:
    p50, p99 = statistics.median(times), times[int(len(times) * 0.99)]
    print(f"{name:<44} {p50:8.1f} {p99:8.1f} {p50 / floor:8.1f}x")


async def bare() -> list[float]:
    """Measure the floor: an interpreter that starts and ends."""
    command = [find_interpreter(by_others=False).executable, "-I", "-S", "-c", "pass"]

    async def once() -> None:
        subprocess.run(command, check=True)  # noqa: ASYNC221 - nothing else runs

    return await timed(once)


async def together(box: Sandbox) -> None:
    counts: dict[str, int] = {}
    slowest = 0.0

    async def one() -> None:
        nonlocal slowest
        name: str
        try:
            result = await box.run(HEAVIER, timeout=DEADLINE)
            name, slowest = result.outcome, max(slowest, result.seconds)
        except SandboxBusy:
            name = "refused"
        counts[name] = counts.get(name, 0) + 1

    start = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(AT_ONCE):
            group.start_soon(one)
    seconds = time.perf_counter() - start
    print(f"  {AT_ONCE} at once: {counts} in {seconds:.2f} s; slowest run {slowest:.2f} s of {DEADLINE:g} s")


async def measure(backend: str, floor: float) -> None:
    try:
        async with Sandbox(backend, limits=SandboxLimits(wall_seconds=DEADLINE), queue_seconds=QUEUE) as box:  # type: ignore[arg-type]
            row(f"{backend}, program", await timed(right(lambda: box.run(PROGRAM), "4950\n")), floor)
            row(f"{backend}, program with sympy", await timed(right(lambda: box.run(HEAVIER)), RUNS // 4), floor)
            async with box.session() as session:
                row(f"{backend}, cell of a session", await timed(right(lambda: session.run(PROGRAM), "4950\n")), floor)
            await together(box)
    except SandboxUnavailable as error:
        print(f"{backend}: {error}")


async def main() -> None:
    warnings.simplefilter("ignore")
    print(f"{'':<44} {'p50 ms':>8} {'p99 ms':>8} {'to bare':>9}")
    times = await bare()
    floor = statistics.median(times)
    row("bare python -I -S -c pass", times, floor)
    for backend in sys.argv[1:] or ("bubblewrap", "landlock", "unsafe_subprocess"):
        await measure(backend, floor)
    row("bare again", await bare(), floor)


if __name__ == "__main__":
    anyio.run(main)
