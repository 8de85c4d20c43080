"""The rollout runner: whole groups, batch after batch, no task left running, no group lost."""

import asyncio
import re
from collections.abc import Callable, Sequence

import anyio
import anyio.lowlevel
import pytest

from agentrl import Sample, Step, Turn
from agentrl.chat import Chat
from agentrl.errors import (
    AgentRLError,
    Blame,
    EngineUnreachable,
    LedgerError,
    PluginError,
)
from agentrl.rollout.coordinator import RolloutCoordinator
from agentrl.rollout.filters import nonzero_std
from agentrl.rollout.settings import FailureAction
from tests.rollout.scripted import END, EchoEnv, Reply, Store, build


async def test_groups_come_whole_and_in_order(chat: Chat) -> None:
    store = Store()
    loop, _ = build(chat, [f"hello{END}"], store=store)
    result = await loop.run(0)
    assert [g[0].group_index for g in result.groups] == [0, 1, 2]
    assert all(len(g) == 2 for g in result.groups)
    assert [s.reward for s in result.groups[0]] == [0.0, 1.0]
    assert store.fate == {0: "completed", 1: "completed", 2: "completed"}


async def test_groups_done_in_an_earlier_life_are_not_generated_again(chat: Chat) -> None:
    store = Store()
    [group] = store.lease(1, 0)
    for sample in group:
        sample.set_prompt_tokens([1])
        sample.append_model([2], [-1.0], "0")
        sample.reward = 0.0
    store.complete(0, group)
    loop, engine = build(chat, [f"hello{END}"], store=store)
    result = await loop.run(0)
    assert len(result.groups) == 3
    assert len(engine.calls) == 4


async def test_the_data_may_end(chat: Chat) -> None:
    loop, _ = build(chat, [f"hello{END}"], store=Store(groups=2))
    assert len((await loop.run(0)).groups) == 2


async def test_a_filter_drops_groups_with_its_reason_and_others_take_their_place(chat: Chat) -> None:
    class Flat(EchoEnv):
        async def reward(self, sample: Sample) -> float:
            return 1.0 if sample.group_index in (0, 2) else float((sample.index or 0) % 2)

    store = Store()
    loop, _ = build(chat, [f"hello{END}"], environment=Flat, group_filter=nonzero_std, store=store)
    result = await loop.run(0)
    assert [g[0].group_index for g in result.groups] == [1, 3, 4]
    assert store.fate[0] == store.fate[2] == "dropped:zero_std_1"
    assert result.stats.dropped == {"zero_std_1": 2}
    assert len(result.stats.offered) == 10


async def test_over_sampled_groups_are_released_not_lost(chat: Chat) -> None:
    def replies(key: str) -> list[Reply]:
        return [lambda: anyio.sleep_forever()] if int(key.split("-")[0]) >= 3 else [f"hello{END}"]

    store = Store()
    loop, engine = build(chat, replies, over_sampling_batch_size=5, store=store)
    result = await loop.run(0)
    assert len(result.groups) == 3
    assert store.fate[3] == store.fate[4] == "released"
    assert engine.cancelled == 4


async def test_a_policy_that_raises_ends_the_run_and_leaves_nothing_running(chat: Chat) -> None:
    def replies(key: str) -> list[Reply]:
        return [EngineUnreachable("no engine")] if key.startswith("1-") else [lambda: anyio.sleep_forever()]

    store = Store()
    loop, engine = build(chat, replies, store=store)
    with pytest.raises(EngineUnreachable, match="no engine"):
        await loop.run(0)
    assert engine.cancelled == 4
    assert set(store.fate.values()) == {"released"}
    assert set(store.released.values()) == {"interrupted"}


async def test_a_rollout_that_keeps_nothing_ends_with_the_reasons(chat: Chat) -> None:
    class Never(EchoEnv):
        async def step(self, turn: Turn) -> Step:
            raise OSError("gone")

    loop, _ = build(chat, [f"x{END}"], environment=Never, failure_policy={Blame.ENV: FailureAction.DROP_GROUP})
    with pytest.raises(AgentRLError, match=r"5\d groups in a row were dropped.*env/env_raised \(5\d\).*OSError: gone"):
        await loop.run(0)


@pytest.mark.parametrize(("equal", "saw"), [(True, "all 0"), (False, "from 0 to 1")])
async def test_a_filter_that_keeps_nothing_is_named_with_the_rewards_that_it_saw(
    chat: Chat, equal: bool, saw: str
) -> None:
    def keep(args: object, samples: list[Sample]) -> bool:
        return False

    async def reward(args: object, sample: Sample) -> float:
        return 0.0 if equal else float((sample.index or 0) % 2)

    loop, _ = build(chat, [f"x{END}"], group_filter=keep, reward=reward)
    with pytest.raises(AgentRLError) as caught:
        await loop.run(0)
    # Groups that were in flight with the fiftieth may be counted too.
    named = rf"filtered \(5\d\); the group filter keep \({__file__}:\d+\)"
    assert re.search(rf"{named} judged 1[01]\d trajectories, whose rewards were {saw}$", str(caught.value))


async def test_drops_count_towards_giving_up_only_in_a_row(chat: Chat) -> None:
    class OneGood(EchoEnv):
        async def reward(self, sample: Sample) -> float:
            return 1.0 if sample.group_index == 5 else float("nan")

    loop, _ = build(chat, [f"x{END}"], environment=OneGood)
    with pytest.raises(AgentRLError, match=r"5\d groups in a row"):
        await loop.run(0)


async def test_one_runner_fills_batch_after_batch_and_keeps_no_surplus(chat: Chat) -> None:
    def replies(key: str) -> list[Reply]:
        return [lambda: anyio.sleep_forever()] if key.split("-")[0] == "1" else [f"hello{END}"]

    store = Store()
    loop, engine = build(chat, replies, over_sampling_batch_size=4, store=store)
    async with loop.running() as runner:
        groups, first, _ = await runner.batch(0)
        assert sorted(group[0].group_index or 0 for group in groups) == [0, 2, 3]
        assert store.fate[1] == "released"
        assert engine.cancelled == 2
        _, second, _ = await runner.batch(1)
    assert {step: len(batch) for step, batch in store.batches.items()} == {0: 3, 1: 3}
    assert store.fate[1] == "released"
    assert len(first.offered) == 6
    assert len(second.offered) == 6
    assert store.leases == [0] * 4 + [1] * 4


@pytest.mark.parametrize("native", [True, False], ids=["by asyncio", "by anyio"])
async def test_a_cancelled_batch_leaves_nothing_leased(chat: Chat, native: bool) -> None:
    store = Store()
    loop, engine = build(chat, [lambda: anyio.sleep_forever()], store=store)

    async def interrupted(runner: RolloutCoordinator) -> None:
        if native:
            task = asyncio.ensure_future(runner.batch(0))
            await until(lambda: len(engine.calls) == 6)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(runner.batch, 0)
                    await until(lambda: len(engine.calls) == 6)
                    scope.cancel()

    async with loop.running() as runner:
        await interrupted(runner)
        assert set(store.fate.values()) == {"released"}
        assert engine.cancelled == 6
        engine.replies = [f"hello{END}"]
        groups, *_ = await runner.batch(1)
    assert len(groups) == 3


async def test_a_runner_that_is_closed_early_releases_its_groups(chat: Chat) -> None:
    store = Store()
    loop, engine = build(chat, [lambda: anyio.sleep_forever()], store=store)
    async with anyio.create_task_group() as outside, loop.running() as runner:
        outside.start_soon(runner.batch, 0)
        await until(lambda: len(engine.calls) == 6)
        outside.cancel_scope.cancel()
    assert set(store.fate.values()) == {"released"}


async def test_a_runner_that_is_closed_while_another_task_fills_a_batch_leases_nothing_again(chat: Chat) -> None:
    store = Store()
    loop, engine = build(chat, [lambda: anyio.sleep_forever()], store=store)
    held: list[RolloutCoordinator] = []
    leave = anyio.Event()

    async def hold() -> None:
        async with loop.running() as runner:
            held.append(runner)
            await leave.wait()

    async def fill() -> None:
        with pytest.raises(AgentRLError, match="the rollout coordinator was closed"):
            await held[0].batch(0)

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold)
            await until(lambda: bool(held))
            tasks.start_soon(fill)
            await until(lambda: len(engine.calls) == 6)
            leave.set()
    assert store.fate == dict.fromkeys(range(3), "released")
    assert len(store.leases) == 3


async def test_a_filter_that_raises_leaves_no_group_leased(chat: Chat) -> None:
    store = Store()
    loop, _ = build(chat, [f"hello{END}"], store=store, group_filter=lambda args, samples: samples[9])
    with pytest.raises(PluginError, match="the group filter <lambda> .* raised IndexError"):
        await loop.run(0)
    assert set(store.fate.values()) == {"released"}


async def test_the_store_gets_the_rewards_of_kept_and_of_dropped_groups(chat: Chat) -> None:
    store = Store()
    loop, _ = build(chat, [f"hello{END}"], store=store, group_filter=lambda args, samples: samples[0].group_index != 1)
    await loop.run(0)
    assert store.fate[1] == "dropped:filtered"
    assert {number: sorted(rewards) for number, rewards in store.rewards.items()} == {key: [0, 1] for key in range(4)}


async def test_a_store_that_fails_ends_the_batch_with_its_error(chat: Chat) -> None:
    class Full(Store):
        def complete(
            self, group_id: int, samples: Sequence[Sample], data: bytes | None = None, rewards: Sequence[float] = ()
        ) -> None:
            raise LedgerError("the disk is full")

    loop, _ = build(chat, [f"hello{END}"], store=Full())
    with pytest.raises(LedgerError, match="the disk is full"):
        await loop.run(0)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until `condition` holds."""
    with anyio.fail_after(120):
        while not condition():
            await anyio.lowlevel.checkpoint()
