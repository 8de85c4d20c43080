"""Many groups of a null environment, with kills and faults: no resource grows with time. `make soak` prints figures.

`AGENTRL_SOAK_GROUPS` sets the number of groups (20,000); the first quarter of them is played with kills.
"""

import logging
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from aiohttp import web

from agentrl.runfolder import BELOW, LEDGER
from tests.engine.faults import FaultyServer, ok, reset, serving, status
from tests.support.audit import audit_ledger
from tests.support.runs import Run, RunKit

GROUPS = int(os.environ.get("AGENTRL_SOAK_GROUPS", "20000"))
BATCH, KILLS = 20, 8
ROLLOUTS = GROUPS // BATCH
NULL_ENV = '''
import random

from agentrl import Environment


class NullEnv(Environment):
    """One turn; one trajectory in a hundred raises."""

    async def reward(self, sample):
        if random.random() < 0.01:
            raise ValueError("now and then")
        return float(sample.index % 2)
'''

_log = logging.getLogger(__name__)
pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(8 * 3600)]


async def now_and_then_wrong(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    """Answer with eight tokens. One answer in thirty is an error, breaks off, or contradicts itself."""
    for record in (server.generates, server.headers, server.aborts):
        record.clear()
    good = ok([7, 9, 11, 13, 15, 17, 19, 21])
    wrong = random.choice([status(500), status(429), reset, ok([7], completion_tokens=5)])
    return await (wrong if random.random() < 1 / 30 else good)(server, body, request)


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources of a process after this many rollouts."""

    rollouts: int
    mib: float
    files: int
    threads: int
    cpu: float
    ledger: int

    @classmethod
    def of(cls, run: Run, ledger: Path) -> "Usage":
        process = psutil.Process(run.process.pid)
        with process.oneshot():
            times, memory = process.cpu_times(), process.memory_info().rss / 2**20
            found = process.num_fds(), process.num_threads(), times.user + times.system
        return cls(rollouts_of(run), memory, *found, ledger.stat().st_size)


def rollouts_of(run: Run) -> int:
    file = run.folder / BELOW["rollout"] / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


async def until_rollouts(run: Run, number: int) -> None:
    while rollouts_of(run) < number:
        assert run.process.poll() is None, f"the run ended early:\n{run.output[-3000:]}"
        await anyio.sleep(0.2)


def part(usages: Sequence[Usage], begin: float, end: float) -> list[Usage]:
    """Return the usages of a part of the last life, from `begin` to `end` of its rollouts."""
    first, last = usages[0].rollouts, usages[-1].rollouts
    low, high = (first + share * (last - first) for share in (begin, end))
    return [usage for usage in usages if low <= usage.rollouts <= high]


def rate(usages: Sequence[Usage], name: str) -> float:
    """Return how much `name` grows for each group."""
    first, last = usages[0], usages[-1]
    return float((getattr(last, name) - getattr(first, name)) / (last.rollouts - first.rollouts) / BATCH)


async def test_nothing_grows_with_the_number_of_groups(tmp_path: Path) -> None:
    kit, rng = RunKit.make(tmp_path), random.Random(0)
    (tmp_path / "null_env.py").write_text(NULL_ENV)
    async with serving(now_and_then_wrong) as one, serving(now_and_then_wrong) as other:
        engines = (one.url.removeprefix("http://"), other.url.removeprefix("http://"))
        arguments = kit.arguments(
            env="null_env.py:NullEnv",
            rollout_external_engine_addrs=engines,
            num_rollout=ROLLOUTS,
            rollout_batch_size=BATCH,
            failure_policy='{"grader": "drop_group", "engine": "retry"}',
            engine_retry_backoff=0.01,
            keep_trajectories=4 * BATCH,
            num_epoch=None,
            lr=None,
            train_threads=None,
            embedded_threads=None,
            embedded_slots=None,
        )
        for number in range(KILLS):
            run = kit.start(arguments, "rollout")
            await until_rollouts(run, ROLLOUTS * (number + 1) // (4 * KILLS))
            await anyio.sleep(rng.uniform(0, 0.5))  # the random moment is the injected fault
            run.process.send_signal(signal.SIGKILL)
            run.process.wait()
        run, usages = kit.start(arguments, "rollout"), list[Usage]()
        ledger = run.folder / BELOW["rollout"] / LEDGER
        while run.process.poll() is None:
            try:
                usages.append(Usage.of(run, ledger))
            except psutil.Error:  # it has just ended
                break
            await anyio.sleep(0.5)
        assert run.wait() == 0, run.output[-3000:]
    begun = [usage for usage in usages if ROLLOUTS // 4 < usage.rollouts < ROLLOUTS]  # then it closes
    early, late = part(begun, 0.1, 0.3), part(begun, 0.8, 1.0)
    for usage in begun[:: max(1, len(begun) // 10)]:
        _log.warning(usage)
    # A trajectory in flight has a socket. The results of a batch may be recorded at once, each in a thread.
    for name, room in (("mib", 16.0), ("files", 2 * BATCH), ("threads", BATCH)):
        before, after = (max(getattr(usage, name) for usage in usages) for usages in (early, late))
        _log.warning(f"{name}: {before:.0f} in the second tenth and the third, {after:.0f} in the last two")
        assert after <= before + room, name
    for name, step in (("cpu", 0.0), ("ledger", 2.5 * 2**16)):  # a ledger sometimes grows by 64 KiB
        first, second = part(begun, 0.1, 0.5), part(begun, 0.6, 1.0)
        before, after = rate(first, name), rate(second, name)
        _log.warning(f"{name} of a group: {before:.5g}, at the end {after:.5g}")
        room = step / (second[-1].rollouts - second[0].rollouts) / BATCH
        assert after <= 1.5 * before + room, name
    result = audit_ledger(ledger, through_step=ROLLOUTS - 1, groups_per_step=BATCH)
    assert result.ok, result.problems
    assert 0 < result.recoveries <= KILLS + 1
