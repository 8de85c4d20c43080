"""Messages between coordinator and worker: a worker's reports, and results of old leases."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import anyio
import pytest

from agentrl import Sample
from agentrl.buffer.codec import decode_group
from agentrl.chat import Chat
from agentrl.errors import SampleError
from agentrl.groups import Group
from agentrl.rollout.coordinator import INTERRUPTED, RolloutCoordinator
from agentrl.rollout.filters import FilterOutput, GroupFilter
from agentrl.rollout.stats import Tally
from agentrl.rollout.worker import Lease, LeaseProgress, Played, Player, RolloutWorker, WorkerLost
from agentrl.train.batch import check_samples
from tests.rollout.scripted import END, EchoEnv, Store, build
from tests.rollout.test_runner import until

HELLO = f"hello{END}"


def lease(store: Store, number: int = 7) -> Lease:
    (group,) = store.lease(1, 3)
    return Lease(number, 0, 3, group)


async def test_a_worker_reports_each_trajectory_and_returns_the_group_encoded_once(chat: Chat) -> None:
    loop, engine = build(chat, [HELLO])
    said: list[LeaseProgress] = []
    given = lease(loop.store)
    played = await RolloutWorker(loop.player).play(given, said.append)
    assert [message.ended for message in said] == [1, 2, 2]
    assert said[-1].summary.tokens.generated == engine.tokens == played.trained
    assert (len(said[0].summary.offered), len(said[-1].summary.offered)) == (0, 2)
    assert {message.lease for message in said} == {played.lease} == {7}
    assert decode_group(played.data) == played.group
    assert [sample.status for sample in given.group] == [Sample.Status.PENDING] * 2, "the lease is as it was"


async def test_a_lease_that_is_cancelled_is_reported_too(chat: Chat) -> None:
    loop, engine = build(chat, lambda key: [HELLO] if key.startswith("0-0") else [anyio.sleep_forever])
    said: list[LeaseProgress] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(RolloutWorker(loop.player).play, lease(loop.store), said.append)
        await until(lambda: len(said) == 1)
        tasks.cancel_scope.cancel()
    assert said[-1].ended == 1
    assert said[-1].summary.tokens.generated == engine.tokens > 0


def without_log_probs(args: object, samples: list[Sample]) -> bool:
    samples[1].rollout_log_probs = None
    return True


def with_too_many_weights(args: object, samples: list[Sample]) -> bool:
    samples[1].train_metadata = {"turn_weights": [1.0, 1.0]}
    return True


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(without_log_probs, "rollout_log_probs is missing"), (with_too_many_weights, "for each of 1 turns")],
)
async def test_a_group_that_cannot_be_trained_is_not_encoded(
    chat: Chat, spoil: GroupFilter, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, _ = build(chat, [HELLO])
    worker = RolloutWorker(loop.player, spoil, check=check_samples)
    monkeypatch.setattr("agentrl.rollout.worker.encode_group", None)
    with pytest.raises(SampleError, match=f"sample index=1.*{message}"):
        await worker.play(lease(loop.store), lambda said: None)
    dropped = RolloutWorker(loop.player, lambda args, samples: not spoil(args, samples), check=check_samples)
    played = await dropped.play(lease(loop.store), lambda said: None)
    assert not played.verdict.keep, "what is dropped may be anything"


@pytest.mark.parametrize("scarce", [True, False])
async def test_a_group_that_may_be_kept_if_groups_are_scarce_waits_for_the_coordinators_word(
    chat: Chat, scarce: bool
) -> None:
    def varied(args: object, samples: list[Sample]) -> FilterOutput:
        return FilterOutput((samples[0].group_index or 0) >= 3, "flat", keep_when_insufficient=True)

    store = Store()
    more: dict[str, Any] = {} if scarce else {"over_sampling_batch_size": 6}
    loop, _ = build(chat, [HELLO], group_filter=varied, store=store, **more)
    groups, *_ = await loop.run(0)
    assert len(groups) == 3
    assert {store.fate[at] for at in range(3)} == {"completed" if scarce else "dropped:flat"}


class Late(Player):
    """Answers late: cancelling does not stop it, or it answers with the result of another lease."""

    def __init__(self, player: Player, *, mistaken: bool = False) -> None:
        self.player, self.mistaken, self.go, self.leases = player, mistaken, anyio.Event(), list[Lease]()

    async def play(self, lease: Lease, report: Callable[[LeaseProgress], None]) -> Played:
        self.leases.append(lease)
        with anyio.CancelScope(shield=True):
            played = await self.player.play(lease, report)
            if lease.number == 0 and not self.mistaken:
                await self.go.wait()
        return replace(played, lease=99) if self.mistaken and lease.number == 0 else played

    async def evaluate(self, number: int, group: Group, tally: Tally) -> Group:
        return await self.player.evaluate(number, group, tally)

    async def figures(self) -> Mapping[str, float]:
        return await self.player.figures()

    async def pause(self) -> None:
        await self.player.pause()

    async def resume(self) -> None:
        await self.player.resume()

    async def updated(self, version: int) -> None:
        await self.player.updated(version)


async def test_the_result_of_a_cancelled_lease_is_discarded_and_its_group_waits(chat: Chat) -> None:
    store = Store()
    loop, _ = build(chat, [HELLO], store=store)
    player = Late(RolloutWorker(loop.player))

    async def cancelling(scope: anyio.CancelScope) -> None:
        await until(lambda: list(store.fate.values()).count("completed") == 2)
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        player.go.set()

    async with RolloutCoordinator.running(player, store, loop.player.context.settings) as coordinator:
        async with anyio.create_task_group() as outside:
            with anyio.CancelScope() as scope:
                outside.start_soon(cancelling, scope)
                await coordinator.batch(0)
        assert store.fate == {0: "released", 1: "completed", 2: "completed"}
        assert store.released == {0: INTERRUPTED}
        groups, stats, full = await coordinator.batch(0)
    assert full
    assert [group[0].group_index for group in groups] == [0, 1, 2]
    assert [(lease.number, lease.group_id) for lease in player.leases] == [(0, 0), (1, 1), (2, 2), (3, 0)]
    assert stats.account.lost[INTERRUPTED] > 0


async def test_the_result_of_another_lease_is_discarded(chat: Chat) -> None:
    store = Store()
    loop, _ = build(chat, [HELLO], store=store)
    player = Late(RolloutWorker(loop.player), mistaken=True)
    async with RolloutCoordinator.running(player, store, loop.player.context.settings) as coordinator:
        groups, *_ = await coordinator.batch(0)
    assert store.released == {0: INTERRUPTED}
    assert store.fate == dict.fromkeys(range(3), "completed")
    assert len(groups) == 3


async def test_a_lease_has_the_step_of_the_batch(chat: Chat) -> None:
    loop, _ = build(chat, [HELLO], store=(store := Store()))
    player = Late(RolloutWorker(loop.player))
    player.go.set()
    async with RolloutCoordinator.running(player, store, loop.player.context.settings) as coordinator:
        for step in (4, 5):
            await coordinator.batch(step)
    assert [lease.step for lease in player.leases] == [4] * 3 + [5] * 3


async def test_pause_resume_and_version_reach_the_engines(chat: Chat) -> None:
    loop, engine = build(chat, [HELLO], environment=EchoEnv)
    worker = RolloutWorker(loop.player)
    await worker.pause()
    assert engine.pause_gate.closed
    await worker.resume()
    assert not engine.pause_gate.closed
    await worker.updated(5)
    assert engine.version == 5


class Deadly(Late):
    """Each worker that plays group 0 dies."""

    async def play(self, lease: Lease, report: Callable[[LeaseProgress], None]) -> Played:
        self.leases.append(lease)
        if lease.group_id == 0:
            raise WorkerLost("a rollout worker died")
        return await self.player.play(lease, report)


async def test_a_group_that_kills_each_worker_is_dropped_and_another_takes_its_place(chat: Chat) -> None:
    store = Store()
    loop, _ = build(chat, [HELLO], store=store)
    player = Deadly(RolloutWorker(loop.player))
    async with RolloutCoordinator.running(player, store, loop.player.context.settings) as coordinator:
        groups, stats, full = await coordinator.batch(0)
    assert full
    assert [group[0].group_index for group in groups] == [1, 2, 3]
    assert store.fate == {0: "dropped:worker lost", 1: "completed", 2: "completed", 3: "completed"}
    assert [lease.group_id for lease in player.leases].count(0) == 5
    assert stats.dropped == {"worker lost": 1}
