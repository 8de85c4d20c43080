"""Hostile answers against every grader that runs in a process: none hangs, crashes, executes code or leaks."""

import gc
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.errors import GraderFailure
from agentrl.rm_hub import GRADERS, Grade, GraderRunner, RmHubSettings
from tests.support import corpus
from tests.support.hostile import attacks
from tests.support.nightly import nightly

NAMES = [name for name, spec in GRADERS.items() if spec.runs == "process" and name != "reasoning_gym"]
"""Our own graders; that one needs a library that may be missing."""
EVERYDAY = ("deepscaler", "tool_call")  # deepscaler reads answers as math does
SETTINGS = RmHubSettings(grader_processes=1, grader_timeout=10.0)


def label_of(name: str) -> tuple[Any, dict[str, Any]]:
    """Return label and metadata of a real item."""
    if name in corpus.NO_CORPUS:
        return None, {}
    item = corpus.load(name)[0]
    # A number that no attack contains: some graders take an answer's last number.
    label = "271828" if name in ("math", "dapo", "deepscaler", "gsm8k") else item.label
    return label, item.metadata


async def outcome_of(pool: GraderRunner, name: str, response: str, label: Any, metadata: Any) -> Grade | GraderFailure:
    try:
        return await pool.grade(name, response, label, metadata)
    except GraderFailure as failure:
        return failure


def attacks_on(name: str, canary: Path, size: int) -> Iterator[tuple[str, str]]:
    """Return `attacks`. For a grader that reads only the text after the reasoning, each is added there too."""
    for title, response in attacks(canary, size):
        yield title, response
        if name == "deepscaler":
            yield f"{title}, after the reasoning", "</think>" + response[-90_000:]


async def attack(
    pool: GraderRunner, name: str, canary: Path, size: int
) -> dict[str, tuple[float, Grade | GraderFailure]]:
    label, metadata = label_of(name)
    outcomes = {}
    for title, response in attacks_on(name, canary, size):
        started = time.monotonic()
        outcome = await outcome_of(pool, name, response, label, metadata)
        outcomes[title] = time.monotonic() - started, outcome
    return outcomes


@pytest.mark.parametrize("name", nightly(NAMES, EVERYDAY))
async def test_hostile_answers(name: str, tmp_path: Path) -> None:
    await check(name, tmp_path / "canary", 100_000)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
async def test_hostile_answers_of_a_megabyte(name: str, tmp_path: Path) -> None:
    await check(name, tmp_path / "canary", 1_000_000)


async def check(name: str, canary: Path, size: int) -> None:
    async with GraderRunner(SETTINGS) as pool:
        outcomes = await attack(pool, name, canary, size)
        kinds = {title: getattr(outcome, "kind", "") for title, (_, outcome) in outcomes.items()}
        # The model wrote the answer: a bad answer gets zero with a reason, never a failure of the grader.
        assert {title: kind for title, kind in kinds.items() if kind} == {}
        assert {
            title: seconds for title, (seconds, _) in outcomes.items() if seconds > SETTINGS.grader_timeout + 2
        } == {}
        if name != "random":
            accepted = [title for title, (_, o) in outcomes.items() if isinstance(o, Grade) and o.correct]
            assert name == "ifbench" or not accepted, accepted
        assert pool.pool.started == 1  # no worker died
    assert os.listdir(os.path.dirname(canary)) == []


LABELS = [
    "9^9^9^9",
    r"\boxed{" * 1000,
    "{" * 10_000,
    "10**10**6",
    "9" * 100_000,
    "\ud800",
    "\x00",
    "",
    " ",
    "(((1",
    "a" * 100_000,
]


@pytest.mark.parametrize("name", nightly([name for name in NAMES if GRADERS[name].needs_label], 1))
async def test_hostile_labels(name: str) -> None:
    _, metadata = label_of(name)
    async with GraderRunner(SETTINGS) as pool:
        for label in [*LABELS, [], {}, 0, -1.5, True, ["a", 3], [None], {"a": [{"b": None}]}, 10**400, float("nan")]:
            for response in ("42", r"The answer is \boxed{42}."):
                outcome = await outcome_of(pool, name, response, label, metadata)
                assert isinstance(outcome, Grade) or outcome.kind.startswith("grader_bad"), (label, outcome)
        assert pool.pool.started == 1


def held(pid: int) -> Counter[str]:
    """Return private memory in kB and open files of a process that has a pool, and of its worker."""
    (worker,) = workers(pid)
    found: Counter[str] = Counter()
    for name, process in (("own", pid), ("worker", worker)):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        found[f"{name} kB"] = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
        found[f"{name} files"] = len(os.listdir(f"/proc/{process}/fd"))
    return found


async def grown(items: int, recycle: int) -> dict[str, int]:
    """Return the growth of `held` over `items` mixed items, from the second quarter's median to the last quarter's."""
    responses = [text for _, text in attacks(Path("/nonexistent/canary"), 2_000) if len(text) < 30_000]
    work = []
    for name in NAMES:
        label, metadata = label_of(name)
        own = [] if name in corpus.NO_CORPUS else [item.response for item in corpus.load(name)[:20]]
        work += [(name, response, label, metadata) for response in (*own, *responses[::5])]
    async with GraderRunner(SETTINGS.model_copy(update={"grader_recycle": recycle}), preload=NAMES) as pool:
        sizes: list[Counter[str]] = []
        for at in range(items):
            await outcome_of(pool, *work[at % len(work)])
            if at % 100 == 50:  # in the middle of a worker's life: after its last item the worker is exiting
                sizes.append(held(os.getpid()))
        assert pool.pool.started == -(-items // recycle)  # no worker died early and hid a leak
        quarter = max(1, len(sizes) // 4)
        return {name: median(sizes[-quarter:], name) - median(sizes[quarter : 2 * quarter], name) for name in sizes[0]}


def median(sizes: list[Counter[str]], name: str) -> int:
    return round(statistics.median(size[name] for size in sizes))


def assert_nothing_leaks(growth: dict[str, int]) -> None:
    allowed = {name: 5_000 if name.endswith("kB") else 0 for name in growth}
    assert {name: size for name, size in growth.items() if size > allowed[name]} == {}


def workers(pid: int) -> list[int]:
    """Return the processes of this process's pools."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in children if "worker.main" in Path(f"/proc/{child}/cmdline").read_text()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recycle", [1000, 100_000])
async def test_ten_thousand_items_leak_nothing(recycle: int) -> None:
    assert_nothing_leaks(await grown(10_000, recycle))


@pytest.mark.slow
async def test_a_worker_stays_small() -> None:
    assert_nothing_leaks(await grown(1_200, recycle=100_000))


@pytest.mark.slow
async def test_the_event_loop_is_not_held_up_by_long_answers() -> None:
    """Measure the CPU time of the loop's thread between two ticks, which other programs do not disturb."""
    steps: list[float] = []
    gc.collect()
    gc.freeze()  # collecting the garbage of other tests must not count

    async def tick() -> None:
        while True:
            before = time.thread_time()
            await anyio.sleep(0.001)
            steps.append(time.thread_time() - before)

    text, listing = "é😀" * 1_000_000, json.dumps(list(range(2000)))
    async with GraderRunner(SETTINGS) as pool, anyio.create_task_group() as group:
        group.start_soon(tick)
        for _ in range(3):
            await outcome_of(pool, "random", text, None, {"seed": 1})
        async with anyio.create_task_group() as many:
            for _ in range(100):
                many.start_soon(outcome_of, pool, "random", listing, None, {})
        group.cancel_scope.cancel()
    gc.unfreeze()
    assert max(steps) < 0.1
