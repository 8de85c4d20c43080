"""The rollout runner: groups whole, failures by policy, nothing left running, nothing lost."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from agentrl import Sample, Status
from agentrl.chat import Chat
from agentrl.config import Args
from agentrl.envs import Step, Turn
from agentrl.errors import (
    AgentRLError,
    Blame,
    EngineUnreachable,
    EnvFailure,
    GraderFailure,
    LedgerError,
    ModelFailure,
    PluginError,
    ToolFailure,
)
from agentrl.rollout.filters import nonzero_std
from agentrl.rollout.runner import RolloutRunner
from agentrl.rollout.settings import FailureAction
from agentrl.sample import Message
from agentrl.tools import Tool
from agentrl.train.batch import TrainBatch
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
    loop, engine = build(chat, [f"hello{END}"], store=store)
    result = await loop.run(0, have=1)
    assert len(result.groups) == 2
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


async def test_a_retry_starts_fresh(chat: Chat) -> None:
    failed: set[str] = set()

    def replies(key: str) -> list[Reply]:
        index, attempt = key.split("-")[1:]
        if index == "1" and attempt == "0":
            failed.add(key)
            return [EngineUnreachable("connection lost")]
        return [f"hello{END}"]

    loop, _ = build(chat, replies, failure_policy={Blame.ENGINE: FailureAction.RETRY})
    result = await loop.run(0)
    assert failed == {"0-1-0"}
    assert result.stats.retries == 1
    assert result.stats.failures == {"engine/engine": 1}
    retried = result.groups[0][1]
    assert retried.metadata["attempt"] == 1
    assert retried.status is Status.COMPLETED
    retried.validate()


async def test_a_timeout_is_kept_masked(chat: Chat) -> None:
    def replies(key: str) -> list[Reply]:
        return [lambda: anyio.sleep_forever()] if key.split("-")[1] == "1" else [f"hello{END}"]

    loop, _ = build(chat, replies, trajectory_timeout=0.3)
    result = await loop.run(0)
    late = result.groups[0][1]
    assert late.remove_sample
    assert late.reward == 0.0
    assert late.status is Status.FAILED
    assert late.metadata["failure"]["blame"] == "timeout"


async def test_a_policy_that_raises_ends_the_run_and_leaves_nothing_running(chat: Chat) -> None:
    def replies(key: str) -> list[Reply]:
        return [EngineUnreachable("no engine")] if key.startswith("1-") else [lambda: anyio.sleep_forever()]

    store = Store()
    loop, engine = build(chat, replies, store=store)
    with pytest.raises(EngineUnreachable, match="no engine"):
        await loop.run(0)
    assert engine.cancelled == 4
    assert set(store.fate.values()) == {"released"}


async def test_a_bad_reward_drops_the_group(chat: Chat) -> None:
    class Nan(EchoEnv):
        async def reward(self, sample: Sample) -> float:
            return float("nan") if sample.group_index == 1 else 1.0

    store = Store()
    loop, _ = build(chat, [f"hello{END}"], environment=Nan, store=store)
    await loop.run(0)
    assert store.fate[1] == "dropped:grader/grader_bad_reward"


@pytest.mark.parametrize("value", ["high", None, True, float("nan"), {"a": float("inf")}])
async def test_what_is_not_a_reward_is_named(chat: Chat, value: object) -> None:
    async def reward(args: Args, sample: Sample, **kwargs: Any) -> object:
        return value

    loop, _ = build(chat, [f"x{END}"], reward=reward, failure_policy={Blame.GRADER: FailureAction.RAISE})
    with pytest.raises(GraderFailure, match="must be a finite number"):
        await loop.run(0)


async def test_reward_functions_in_all_forms(chat: Chat) -> None:
    async def one(args: Args, sample: Sample, **kwargs: Any) -> float:
        return float(sample.index or 0)

    def plain(args: Args, sample: Sample) -> float:
        return float(sample.index or 0)

    async def batched(args: Args, samples: list[Sample]) -> list[float]:
        return [float(s.index or 0) for s in samples]

    def samples_only(samples: list[Sample], **kwargs: Any) -> list[float]:
        return [float(s.index or 0) for s in samples]

    for function, group_rm in ((one, False), (plain, False), (batched, True), (samples_only, False)):
        loop, _ = build(chat, [f"x{END}"], reward=function, group_rm=group_rm)
        result = await loop.run(0)
        assert [s.reward for g in result.groups for s in g] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], function


async def test_generate_functions_in_all_forms(chat: Chat) -> None:
    def fill(sample: Sample) -> Sample:
        sample.set_prompt_tokens([1, 2])
        sample.append_model([3], [-0.1], "0", text="x")
        sample.reward = 1.0
        return sample

    async def group(args: Args, samples: list[Sample]) -> list[Sample]:
        return [fill(s) for s in samples]

    async def group_eval(args: Args, samples: list[Sample], evaluation: bool = False) -> list[Sample]:
        assert evaluation is False
        return [fill(s) for s in samples]

    async def single(args: Args, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        assert sampling_params["temperature"] == 1.0
        return fill(sample)

    async def single_eval(
        args: Args, sample: Sample, sampling_params: object, evaluation: bool = False
    ) -> list[Sample]:
        return [fill(sample)]

    for function in (group, group_eval, single, single_eval):
        loop, _ = build(chat, [], generate=function, environment=None)
        assert len((await loop.run(0)).groups) == 3, function


async def test_fan_out_shares_a_rollout_id(chat: Chat) -> None:
    async def two(args: Args, sample: Sample, sampling_params: object) -> list[Sample]:
        out = []
        for _ in range(2):
            part = Sample(tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0], reward=1.0)
            out.append(part)
        return out

    loop, _ = build(chat, [], generate=two, environment=None)
    group = (await loop.run(0)).groups[0]
    assert [s.rollout_id for s in group] == [0, 0, 1, 1]
    assert all(s.loss_mask == [1] for s in group)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: "text", "must return a list of samples"),
        (lambda s: s[:1], "returned 1 items for a group of 2 samples"),
        (lambda s: [None, None], "must return a Sample or a non-empty list of them"),
        (lambda s: s, "returned a sample without tokens"),
        (
            lambda s: [Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[1]) for _ in s],
            "misaligned sample: .*loss_mask has 1 entries",
        ),
    ],
)
async def test_what_a_generate_function_may_not_return(
    chat: Chat, make: Callable[[list[Sample]], object], message: str
) -> None:
    async def generate(args: Args, samples: list[Sample]) -> object:
        return make(samples)

    loop, _ = build(chat, [], generate=generate, environment=None)
    with pytest.raises(EnvFailure, match=message):
        await loop.run(0)


async def test_a_rollout_that_keeps_nothing_ends_with_the_reasons(chat: Chat) -> None:
    loop, _ = build(chat, [f"x{END}"], rollout_max_prompt_len=3)
    with pytest.raises(AgentRLError, match=r"50 groups in a row were dropped.*nothing_to_train.*at most 3 fit"):
        await loop.run(0)


async def test_a_sample_that_failed_before_its_prompt_still_fits_a_train_batch(chat: Chat) -> None:
    class SlowStart(EchoEnv):
        async def reset(self, sample: Sample) -> list[Message]:
            if sample.index == 1:
                await anyio.sleep_forever()
            return await super().reset(sample)

    loop, _ = build(chat, [f"hello{END}"], environment=SlowStart, trajectory_timeout=0.3)
    result = await loop.run(0)
    batch = TrainBatch.from_samples(result.groups, None)
    assert len(batch) == 6
    assert batch.response_lengths[1] == 0


async def test_a_close_that_fails_does_not_hide_what_ended_the_trajectory(chat: Chat) -> None:
    class BadClose(EchoEnv):
        async def close(self) -> None:
            raise OSError("cannot close")

    loop, _ = build(chat, [lambda: anyio.sleep_forever()], environment=BadClose, trajectory_timeout=0.2)
    with pytest.raises(AgentRLError, match=r"groups in a row were dropped.*longer than 0.2 s"):
        await loop.run(0)


async def test_drops_count_towards_giving_up_only_in_a_row(chat: Chat) -> None:
    class OneGood(EchoEnv):
        async def reward(self, sample: Sample) -> float:
            return 1.0 if sample.group_index == 5 else float("nan")

    loop, _ = build(chat, [f"x{END}"], environment=OneGood)
    with pytest.raises(AgentRLError, match="50 groups in a row"):
        await loop.run(0)


@pytest.mark.parametrize("synchronous", [False, True])
async def test_waiting_for_a_busy_tool_is_not_the_environments_time(chat: Chat, synchronous: bool) -> None:
    async def slow(x: int) -> int:
        await anyio.sleep(0.1)
        return x

    def blocking(x: int) -> int:
        time.sleep(0.1)
        return x

    class Busy(EchoEnv):
        tools = [Tool(blocking if synchronous else slow, name="slow", description="Slow.", max_concurrency=1)]

    call = '<tool_call>\n{"name": "slow", "arguments": {"x": 1}}\n</tool_call>'
    # Two calls a turn, ten trajectories: 2 s of work in a queue.
    loop, _ = build(chat, [call + call + END, f"done{END}"], environment=Busy, env_timeout=1.2, rollout_batch_size=5)
    result = await loop.run(0)
    assert all(s.metadata["counters"]["tool_ok"] == 2 for group in result.groups for s in group)


async def test_a_call_that_hangs_after_its_wait_still_ends(chat: Chat) -> None:
    class Hanging(EchoEnv):
        tools = [Tool(lambda: "x", name="quick", description="Quick.", max_concurrency=1)]

        async def step(self, turn: Turn) -> Step:
            await super().step(turn)
            await anyio.sleep_forever()
            raise AssertionError

    call = f'<tool_call>\n{{"name": "quick", "arguments": {{}}}}\n</tool_call>{END}'
    loop, _ = build(chat, [call], environment=Hanging, env_timeout=0.2, rollout_batch_size=6)
    with pytest.raises(EnvFailure, match=r"Hanging.step took longer than 0.2 s"):
        await loop.run(0)


async def test_a_retry_shares_nothing_with_the_attempt_before(chat: Chat) -> None:
    async def generate(args: Args, sample: Sample, params: object) -> Sample:
        sample.tokens += [1, 2]
        sample.metadata["seen"]["turns"].append(1)
        assert isinstance(sample.prompt, list)
        sample.prompt[0]["content"].append("more")
        if "attempt" not in sample.metadata:
            raise ToolFailure("the first time")
        sample.append_model([3], [-1.0], "0")
        sample.reward = 1.0
        return sample

    class Nested(Store):
        def lease(self, n: int, step: int) -> list[list[Sample]]:
            groups = super().lease(n, step)
            for sample in (s for group in groups for s in group):
                sample.prompt = [{"role": "user", "content": ["q"]}]
                sample.metadata["seen"] = {"turns": []}
            return groups

    loop, _ = build(chat, [], generate=generate, environment=None, store=Nested())
    result = await loop.run(0)
    assert result.stats.retries == 6
    sample = result.groups[0][0]
    assert sample.tokens == [1, 2, 3]
    assert sample.metadata["seen"] == {"turns": [1]}
    assert isinstance(sample.prompt, list)
    assert sample.prompt[0]["content"] == ["q", "more"]


async def test_what_failed_without_a_mask_is_not_trained_on(chat: Chat) -> None:
    async def generate(args: Args, sample: Sample, params: object) -> Sample:
        sample.tokens, sample.response_length = [1, 2, 3, 4, 5], 4
        sample.rollout_log_probs = [-1.0, -1.0, 0.0, 0.0]  # two tokens of the model, two of a tool, and no mask yet
        if sample.index == 0:
            raise ModelFailure("cannot go on")
        sample.loss_mask, sample.reward = [1, 1, 0, 0], 1.0
        if sample.index == 2:
            raise ModelFailure("cannot go on")
        return sample

    loop, _ = build(chat, [], generate=generate, environment=None)
    result = await loop.run(0)
    batch = TrainBatch.from_samples(result.groups)
    assert [batch.sample_loss_mask(i).tolist() for i in range(3)] == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]


async def test_lists_that_a_deadline_caught_half_way_do_not_end_the_run(chat: Chat) -> None:
    async def generate(args: Args, sample: Sample, params: object) -> Sample:
        sample.tokens, sample.loss_mask = [1, 2, 3], [1, 1]
        if sample.index == 0:
            await anyio.sleep_forever()
        sample.response_length, sample.rollout_log_probs, sample.reward = 2, [-1.0, -1.0], 1.0
        return sample

    loop, _ = build(chat, [], generate=generate, environment=None, trajectory_timeout=0.3)
    batch = TrainBatch.from_samples((await loop.run(0)).groups)
    assert batch.response_lengths.tolist() == [0, 2, 2, 2, 2, 2]


async def test_one_runner_fills_batch_after_batch_and_keeps_no_surplus(chat: Chat) -> None:
    def replies(key: str) -> list[Reply]:
        return [lambda: anyio.sleep_forever()] if key.split("-")[0] == "1" else [f"hello{END}"]

    store = Store()
    loop, engine = build(chat, replies, over_sampling_batch_size=4, store=store)
    async with RolloutRunner.running(loop.player, store) as runner:
        first = await runner.fill(0)
        assert sorted(store.kept) == [0, 2, 3]
        assert store.fate[1] == "released"
        assert engine.cancelled == 2
        second = await runner.fill(1)
    assert len(store.kept) == 6
    assert sorted(store.fate.values()) == ["completed"] * 6 + ["released"] * 2
    assert len(first.offered) == 6
    assert len(second.offered) in (6, 8)
    assert store.steps == [0] * 4 + [1] * 4


@pytest.mark.parametrize("native", [True, False], ids=["by asyncio", "by anyio"])
async def test_a_cancelled_batch_leaves_nothing_leased(chat: Chat, native: bool) -> None:
    store = Store()
    loop, engine = build(chat, [lambda: anyio.sleep_forever()], store=store)

    async def interrupted(runner: RolloutRunner) -> None:
        if native:
            task = asyncio.ensure_future(runner.fill(0))
            await until(lambda: len(engine.calls) == 6)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(runner.fill, 0)
                    await until(lambda: len(engine.calls) == 6)
                    scope.cancel()

    async with RolloutRunner.running(loop.player, store) as runner:
        await interrupted(runner)
        assert set(store.fate.values()) == {"released"}
        assert engine.cancelled == 6
        engine.replies = [f"hello{END}"]
        await runner.fill(1)
    assert len(store.kept) == 3


async def test_a_runner_that_is_left_in_the_middle_gives_back_what_it_plays(chat: Chat) -> None:
    store = Store()
    loop, engine = build(chat, [lambda: anyio.sleep_forever()], store=store)
    async with anyio.create_task_group() as outside, RolloutRunner.running(loop.player, store) as runner:
        outside.start_soon(runner.fill, 0)
        await until(lambda: len(engine.calls) == 6)
        outside.cancel_scope.cancel()
    assert set(store.fate.values()) == {"released"}


async def test_a_runner_that_is_closed_while_another_task_fills_a_batch_leases_nothing_again(chat: Chat) -> None:
    store = Store()
    loop, engine = build(chat, [lambda: anyio.sleep_forever()], store=store)
    held: list[RolloutRunner] = []
    leave = anyio.Event()

    async def hold() -> None:
        async with RolloutRunner.running(loop.player, store) as runner:
            held.append(runner)
            await leave.wait()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold)
            await until(lambda: bool(held))
            tasks.start_soon(held[0].fill, 0)
            await until(lambda: len(engine.calls) == 6)
            leave.set()
    assert store.fate == dict.fromkeys(range(3), "released")
    assert len(store.steps) == 3


async def test_a_filter_that_raises_leaves_no_group_leased(chat: Chat) -> None:
    store = Store()
    loop, _ = build(chat, [f"hello{END}"], store=store, group_filter=lambda args, samples: samples[9])
    with pytest.raises(PluginError, match="the group filter raised IndexError"):
        await loop.run(0)
    assert set(store.fate.values()) == {"released"}


async def test_a_store_that_fails_ends_the_batch_with_its_error(chat: Chat) -> None:
    class Full(Store):
        def complete(self, group_id: int, samples: Sequence[Sample]) -> None:
            raise LedgerError("the disk is full")

    loop, _ = build(chat, [f"hello{END}"], store=Full())
    with pytest.raises(LedgerError, match="the disk is full"):
        await loop.run(0)


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until `condition` holds."""
    with anyio.fail_after(10):
        while not condition():
            await anyio.lowlevel.checkpoint()
