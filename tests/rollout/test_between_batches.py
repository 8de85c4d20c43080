"""The runner in an asynchronous run: work between batches, groups that become too old, and the fate of every token."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread

from agentrl import Sample
from agentrl.buffer.ledger import Ledger
from agentrl.buffer.queue import GroupQueue
from agentrl.chat import Chat
from agentrl.data.source import DataSource
from agentrl.errors import EngineUnreachable
from agentrl.rollout.filters import nonzero_std
from agentrl.rollout.stats import TokenBalance
from tests.buffer.make import make_args, prompts, source_of
from tests.rollout.scripted import END, EchoEnv, Reply, Store, build
from tests.rollout.test_runner import until
from tests.support.audit import audit_ledger

HELLO = f"hello{END}"


def slow(*groups: int) -> Callable[[str], list[Reply]]:
    """Answer at once, but never for these groups."""
    return lambda key: [anyio.sleep_forever] if int(key.split("-")[0]) in groups else [HELLO]


def numbers(groups: list[list[Sample]]) -> list[int]:
    return sorted(group[0].group_index or 0 for group in groups)


async def completed(store: Store, groups: int) -> None:
    await until(lambda: list(store.fate.values()).count("completed") == groups)


async def settled() -> None:
    """Let all tasks run until they wait."""
    for _ in range(50):
        await anyio.lowlevel.checkpoint()


def adds_up(account: TokenBalance) -> bool:
    return account.generated == account.trained + account.waiting + sum(account.lost.values())


async def test_the_next_batch_is_played_while_one_is_trained(chat: Chat) -> None:
    store = Store()
    loop, engine = build(chat, [HELLO], store=store, max_staleness=1)
    async with loop.running() as runner:
        first = numbers((await runner.batch(0))[0])
        assert len(first) == 3
        await until(lambda: list(store.fate.values()).count("completed") == 6)
        assert store.leases == [0] * 6, "no more, or the weights that play them would be too old"
        await runner.updated(1)
        await until(lambda: list(store.fate.values()).count("completed") == 9)
        assert store.leases == [0] * 6 + [1] * 3
        calls = len(engine.calls)
        groups, *_ = await runner.batch(1)
        assert (numbers(groups), len(engine.calls)) == (sorted({*range(6)} - {*first}), calls)


async def test_groups_that_no_batch_needs_yet_are_leased_under_newer_weights(chat: Chat) -> None:
    store, rest = Store(), 8
    loop, _ = build(chat, [HELLO], store=store, max_staleness=3)
    async with loop.running() as runner:
        for step in range(rest):
            await runner.batch(step)
            await runner.updated(step + 1)
            await completed(store, 3 * (step + 3))  # staleness allows two more batches
    assert store.leases == [0] * 6 + [step + 1 for step in range(rest) for _ in range(3)]
    assert {store.versions[at] for at in store.batches[rest - 1]} == {rest - 2}


async def test_nothing_is_played_between_batches_of_a_synchronous_run(chat: Chat) -> None:
    store = Store()
    loop, engine = build(chat, [HELLO], store=store)
    async with loop.running() as runner:
        await runner.batch(0)
        await runner.updated(1)
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert len(engine.calls) == 6


async def test_a_straggler_joins_the_last_batch_that_can_take_it(chat: Chat) -> None:
    release = anyio.Event()

    async def late() -> str:
        await release.wait()
        return HELLO

    store = Store()
    loop, _ = build(chat, lambda key: [late] if key.startswith("0-") else [HELLO], store=store, max_staleness=1)
    async with loop.running() as runner:
        assert 0 not in numbers((await runner.batch(0))[0])
        await runner.updated(1)
        second: list[int] = []

        async def next_batch() -> None:
            second.extend(numbers((await runner.batch(1))[0]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(next_batch)
            await until(lambda: list(store.fate.values()).count("completed") >= 7)
            assert not second, "seven groups are finished, but without the eighth it would be too old"
            release.set()
        assert second[0] == 0


@pytest.mark.parametrize(("policy", "fate"), [("regenerate", "released"), ("drop", "dropped:too old")])
async def test_what_over_sampling_leaves_behind_is_made_again_or_dropped(chat: Chat, policy: str, fate: str) -> None:
    store = Store()
    settings: dict[str, Any] = {"max_staleness": 1, "over_sampling_batch_size": 4, "stale_groups": policy}
    loop, engine = build(chat, slow(0), store=store, **settings)
    async with loop.running() as runner:
        await runner.batch(0)
        assert store.fate[0] == "leased"
        await runner.updated(1)
        _, stats, _ = await runner.batch(1)
        assert store.fate[0] == fate
        assert set(store.released.values()) <= {"too old"}
        assert stats.dropped["too old"] == sum(end == "dropped:too old" for end in store.fate.values())
        assert engine.cancelled == 2
        assert adds_up(stats.account)


async def test_a_partial_rollout_holds_the_engines_between_batches_and_keeps_what_is_in_play(chat: Chat) -> None:
    store = Store()
    masked: dict[str, Any] = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}
    loop, engine = build(chat, slow(0), store=store, over_sampling_batch_size=4, **masked)
    async with loop.running() as runner:
        await runner.batch(0)
        assert engine.pause_gate.closed
        assert (store.fate[0], engine.cancelled) == ("leased", 0)
        await runner.updated(1)
        await runner.batch(1)
        assert store.leases == [0] * 4 + [1] * 3


class Compact(Store):
    """Gives samples as the ledger does: with arrays instead of lists."""

    def complete(
        self, group_id: int, samples: Sequence[Sample], data: bytes | None = None, rewards: Sequence[float] = ()
    ) -> None:
        super().complete(group_id, [sample.compact() for sample in samples])


async def test_tokens_of_older_weights_are_masked_and_counted(chat: Chat) -> None:
    store = Compact()
    masked: dict[str, Any] = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}
    loop, _ = build(chat, [HELLO], store=store, **masked)
    async with loop.running() as runner:
        await runner.updated(4)  # the scripted engine reports version 3
        groups, stats, _ = await runner.batch(4)
    assert {sample.trained_tokens for group in groups for sample in group} == {0}
    assert stats.account.trained == 0
    assert stats.account.lost["off-policy"] == stats.account.generated > 0


@pytest.mark.parametrize(("most", "trained"), [(0, False), (1, True)])
async def test_tokens_that_are_too_stale_are_masked_and_counted(chat: Chat, most: int, trained: bool) -> None:
    store = Compact()
    loop, _ = build(chat, [HELLO], store=store, max_staleness=2, max_token_staleness=most)
    async with loop.running() as runner:
        await runner.updated(4)  # the scripted engine says that its weights are of version 3
        groups, stats, _ = await runner.batch(4)
    assert all((sample.trained_tokens > 0) == trained for group in groups for sample in group)
    assert (stats.account.trained > 0) == trained
    assert (stats.account.lost["off-policy"] == 0) == trained


def divmod_of(a: int, b: int) -> str:
    """Divide."""
    return str(divmod(a, b))


async def test_every_token_that_an_engine_gave_is_accounted_for(chat: Chat) -> None:
    """Retries, masked failures, filtered groups, unfinished groups, groups that wait."""

    class Sorted(EchoEnv):
        tools = [divmod_of]

        async def reward(self, sample: Sample) -> float:
            return 1.0 if sample.group_index == 1 else await super().reward(sample)

    def replies(key: str) -> list[Reply]:
        group, _, attempt = map(int, key.split("-"))
        if group == 2 and attempt == 0:
            return [f'<tool_call>{{"name": "nothing", "arguments": {{}}}}</tool_call>{END}', EngineUnreachable("gone")]
        return [anyio.sleep_forever] if group == 3 else [HELLO]

    store = Store()
    loop, engine = build(
        chat,
        replies,
        environment=Sorted,
        group_filter=nonzero_std,
        store=store,
        max_staleness=1,
        over_sampling_batch_size=4,
        failure_policy={"engine": "retry"},
    )
    async with loop.running() as runner:
        for step in range(3):
            await runner.updated(step)
            _, stats, _ = await runner.batch(step)
            assert adds_up(stats.account)
        assert stats.account.generated <= engine.tokens
        assert {"retried", "zero_std_1"} <= stats.account.lost.keys()
        assert stats.account.trained == sum(
            sample.trained_tokens for batch in store.batches.values() for at in batch for sample in store.completed[at]
        )


async def test_a_failure_between_batches_ends_the_next_one(chat: Chat) -> None:
    handed = anyio.Event()

    async def fail() -> str:
        await handed.wait()
        raise EngineUnreachable("gone")

    store = Store()
    loop, _ = build(chat, lambda key: [fail] if int(key.split("-")[0]) >= 3 else [HELLO], store=store, max_staleness=1)
    async with loop.running() as runner:
        await runner.batch(0)
        handed.set()
        await until(lambda: "released" in store.fate.values())
        with pytest.raises(EngineUnreachable, match="gone"):
            await runner.batch(1)
    assert "leased" not in store.fate.values()


async def test_a_group_that_is_leased_again_at_once_does_not_hold_up_the_batch(chat: Chat) -> None:
    lives: Counter[int] = Counter()

    class SlowToClose(EchoEnv):
        async def reset(self, sample: Sample) -> list[dict[str, Any]]:
            self.group = sample.group_index or 0
            lives[self.group] += 1
            return await super().reset(sample)

        async def close(self) -> None:
            if self.group == 1 and lives[1] == 1:
                await anyio.sleep(0.1)  # meanwhile group 0 is released and leased again

    async def second_life() -> str:
        await anyio.sleep(60)
        return HELLO

    def replies(key: str) -> list[Reply]:
        group = int(key.split("-")[0])
        return [HELLO] if group > 1 else [anyio.sleep_forever] if lives[group] == 1 else [second_life]

    store = Store(size=1)
    one: dict[str, Any] = {"over_sampling_batch_size": 5, "n_samples_per_prompt": 1}
    loop, _ = build(chat, replies, environment=SlowToClose, store=store, max_staleness=1, **one)
    async with loop.running() as runner:
        await runner.batch(0)
        await runner.updated(1)
        began = anyio.current_time()
        await runner.batch(1)
        assert anyio.current_time() - began < 30
        assert lives[0] == 2


async def test_a_run_goes_on_from_a_checkpoint_whose_successors_are_lost(chat: Chat, tmp_path: Path) -> None:
    """Checkpoints after steps 1 and 3. The run is killed after step 4 was trained; the checkpoint of step 3 is lost."""
    args = make_args(prompts(tmp_path / "prompts.jsonl", 100))
    loop, _ = build(chat, [HELLO], rollout_batch_size=2)

    async def play(steps: range, resume: int | None) -> None:
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            queue = GroupQueue(source_of(args), ledger, resume)
            async with loop.running(queue) as runner:
                for step in steps:
                    await runner.updated(step)
                    groups, *_ = await runner.batch(step)
                    assert len(groups) == 2
                    queue.trained([group[0].group_index or 0 for group in groups], step)
                    if step in (1, 3):
                        queue.checkpointed(step)

    await play(range(5), None)
    await play(range(2, 7), 1)
    result = audit_ledger(tmp_path / "ledger.sqlite", through_step=6, groups_per_step=2)
    assert result.ok, result.problems


class SlowToLease(Store):
    """Waits in `lease` for the test, once this number of groups has been leased."""

    def __init__(self, after: int, groups: int = 1000) -> None:
        super().__init__(groups)
        self.after, self.leasing, self.goes_on = after, threading.Event(), threading.Event()

    def lease(self, n: int, version: int) -> list[list[Sample]]:
        waits = self.next >= self.after and not self.leasing.is_set()
        given = super().lease(n, version)
        if waits:
            self.leasing.set()
            self.goes_on.wait(1)
        return given


async def test_a_group_that_is_leased_during_a_weight_update_has_the_version_of_its_lease(chat: Chat) -> None:
    fails, answers = anyio.Event(), anyio.Event()

    def waits_for(event: anyio.Event) -> Callable[[], Any]:
        async def late() -> str:
            await event.wait()
            return HELLO

        return late

    late = {"5": waits_for(fails), "6": waits_for(answers)}
    store = SlowToLease(after=6)
    loop, _ = build(
        chat,
        lambda key: [late.get(key.split("-")[0], HELLO)],
        group_filter=lambda args, samples: samples[0].group_index != 5,
        store=store,
        max_staleness=1,
    )
    async with loop.running() as runner, anyio.create_task_group() as tasks:
        await runner.batch(0)
        fails.set()  # another group replaces group 5
        await until(store.leasing.is_set)
        tasks.start_soon(runner.updated, 1)
        await settled()
        store.goes_on.set()
        await completed(store, 8)
        assert store.versions == dict.fromkeys(range(7), 0) | dict.fromkeys(range(7, 10), 1)
        tasks.start_soon(runner.batch, 1)
        await settled()
        answers.set()
        await until(lambda: 1 in store.batches and store.fate[6] == "completed")
        await runner.updated(2)
        _, stats, _ = await runner.batch(2)
    assert "too old" not in stats.account.lost


async def test_groups_that_are_too_old_are_made_again_also_where_no_other_is_left(chat: Chat) -> None:
    store = SlowToLease(after=10, groups=10)
    loop, _ = build(
        chat,
        [HELLO],
        group_filter=lambda args, samples: samples[0].group_index != 9,
        store=store,
        max_staleness=1,
        over_sampling_batch_size=4,
    )
    async with loop.running() as runner:
        await runner.batch(0)
        await completed(store, 7)
        await runner.updated(1)
        await until(lambda: store.fate.get(9) == "dropped:filtered")
        await runner.batch(1)
        await runner.updated(2)
        await until(store.leasing.is_set)
        async with anyio.create_task_group() as tasks:
            third: list[bool] = []

            async def last_batch() -> None:
                third.append((await runner.batch(2)).full)

            tasks.start_soon(last_batch)
            await settled()
            store.goes_on.set()
    assert third == [True]


async def test_a_users_source_is_called_by_one_thread_at_a_time(chat: Chat, tmp_path: Path) -> None:
    class Source(DataSource):
        n_samples_per_prompt = 1
        inside = overlaps = given = 0

        @property
        def choice(self) -> None:
            return None

        def get_samples(self, num_groups: int) -> list[list[Sample]]:
            self._work()
            self.given += num_groups
            return [[Sample(prompt="q", index=self.given - i)] for i in range(num_groups)]

        def add_samples(self, groups: Sequence[list[Sample]]) -> None:
            self._work()

        def save(self, path: str | Path) -> None:
            self._work()
            Path(path).write_text("")

        def load(self, path: str | Path) -> None:
            self._work()

        def __len__(self) -> int:
            return 1000

        def commit(self, group_ids: Iterable[int], step: int) -> None:
            self._work()

        def _work(self) -> None:
            self.inside += 1
            self.overlaps += self.inside > 1
            time.sleep(0.005)
            self.inside -= 1

    source = Source()
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        queue = GroupQueue(source, ledger)
        loop, _ = build(chat, [HELLO], rollout_batch_size=2, n_samples_per_prompt=1, max_staleness=4)
        async with loop.running(queue) as runner:
            for step in range(6):
                groups, *_ = await runner.batch(step)
                await runner.updated(step + 1)  # so that others start at this moment
                await to_thread.run_sync(queue.trained, [group[0].group_index or 0 for group in groups], step)
    assert not source.overlaps


async def test_tokens_of_a_batch_that_was_handed_over_do_not_count_as_waiting(chat: Chat, tmp_path: Path) -> None:
    """With the real ledger, in which a batch belongs to its step until the step is trained."""
    args = make_args(prompts(tmp_path / "prompts.jsonl", 9))
    loop, _ = build(chat, [HELLO], rollout_batch_size=2)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        async with loop.running(GroupQueue(source_of(args), ledger)) as runner:
            for step in range(2):
                _, stats, _ = await runner.batch(step)
                assert adds_up(stats.account)
                assert (stats.account.waiting, stats.account.lost) == (0, {})
                await runner.updated(step + 1)
