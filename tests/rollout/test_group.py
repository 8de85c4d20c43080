"""One group: failures by policy, rewards and generate functions in all forms, no shared state between attempts."""

import time
from collections.abc import Callable
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
    DataError,
    EngineUnreachable,
    EnvFailure,
    GraderFailure,
    ModelFailure,
    SampleError,
    ToolFailure,
)
from agentrl.rollout.settings import FailureAction
from agentrl.sample import Message
from agentrl.tools import Tool, ToolError
from agentrl.train.batch import TrainBatch
from tests.rollout.scripted import END, EchoEnv, Reply, Store, build
from tests.support.nightly import nightly
from tests.support.virtual_time import virtual_time


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


async def test_the_first_request_is_on_its_way_before_the_last_trajectory_begins(chat: Chat) -> None:
    begun = 0
    seen: list[int] = []

    class Beginning(EchoEnv):
        async def reset(self, sample: Sample) -> list[Message]:
            nonlocal begun
            begun += 1
            return await super().reset(sample)

    async def written() -> str:
        for _ in range(5):
            await anyio.lowlevel.checkpoint()  # a connection must open first
        seen.append(begun)
        return f"hello{END}"

    loop, _ = build(chat, [written], environment=Beginning, rollout_batch_size=20, n_samples_per_prompt=2)
    await loop.run(0)
    assert seen[0] < 10
    assert begun == 40


@virtual_time
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


async def test_a_bad_reward_drops_the_group(chat: Chat) -> None:
    class Nan(EchoEnv):
        async def reward(self, sample: Sample) -> float:
            return float("nan") if sample.group_index == 1 else 1.0

    store = Store()
    loop, _ = build(chat, [f"hello{END}"], environment=Nan, store=store)
    await loop.run(0)
    assert store.fate[1] == "dropped:grader/grader_bad_reward"


@pytest.mark.parametrize("value", nightly(["high", None, float("nan"), {"a": float("inf")}], 2))
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


@pytest.mark.parametrize("action", [FailureAction.SCORE, FailureAction.KEEP_MASKED])
async def test_a_failure_after_a_restart_keeps_all_parts(chat: Chat, action: FailureAction) -> None:
    class Breaks(EchoEnv):
        async def step(self, turn: Turn) -> Step:
            if turn.sample.index != 0:
                return Step(done=True)
            if turn.index == 1:
                return Step(restart=[{"role": "user", "content": "summary"}])
            if turn.index == 2:
                return Step([{"role": "user", "content": "go on"}])
            raise ModelFailure("unusable answer")

    replies: list[Reply] = [f"one{END}", f"two{END}", f"three{END}"]
    loop, _ = build(chat, replies, environment=Breaks, failure_policy={Blame.MODEL: action})
    result = await loop.run(0)
    first, last = [s for s in result.groups[0] if s.index == 0]
    assert [first.model_turns, last.model_turns] == [1, 3]
    assert (first.status, last.status) == (Status.COMPLETED, Status.FAILED)
    assert [first.reward, last.reward] == [0.0, 0.0]
    assert "failure" in last.metadata
    assert first.remove_sample == last.remove_sample == (action is FailureAction.KEEP_MASKED)


async def test_user_code_that_errs_with_this_packages_errors_follows_the_failure_policy(chat: Chat) -> None:
    def raising(make: Callable[[], Exception]) -> type[EchoEnv]:
        class Errs(EchoEnv):
            async def step(self, turn: Turn) -> Step:
                if turn.sample.group_index == 1:
                    raise make()
                return Step(done=True)

        return Errs

    class Mistyped(EchoEnv):
        async def step(self, turn: Turn) -> Step:
            wrong: Any = {"role": "user", "content": 5}
            return Step([wrong] if turn.sample.group_index == 1 else [], done=turn.sample.group_index != 1)

    errors = [lambda: ToolError("nothing found"), lambda: SampleError("no reward"), lambda: DataError("no file")]
    for environment in (*map(raising, errors), Mistyped):
        store = Store()
        policy = {Blame.ENV: FailureAction.DROP_GROUP}
        loop, _ = build(chat, [f"x{END}"], environment=environment, store=store, failure_policy=policy)
        await loop.run(0)
        assert store.fate[1] == "dropped:env/env_raised"


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


@virtual_time
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


@virtual_time
async def test_a_close_that_fails_does_not_hide_what_ended_the_trajectory(chat: Chat) -> None:
    class BadClose(EchoEnv):
        async def close(self) -> None:
            raise OSError("cannot close")

    loop, _ = build(chat, [lambda: anyio.sleep_forever()], environment=BadClose, trajectory_timeout=0.2)
    with pytest.raises(AgentRLError, match=r"groups in a row were dropped.*longer than 0.2 s"):
        await loop.run(0)


@pytest.mark.parametrize("synchronous", [False, True])
async def test_waiting_for_a_busy_tool_is_not_the_environments_time(chat: Chat, synchronous: bool) -> None:
    async def slow(x: int) -> int:
        await anyio.sleep(0.25)
        return x

    def blocking(x: int) -> int:
        time.sleep(0.25)
        return x

    class Busy(EchoEnv):
        tools = [Tool(blocking if synchronous else slow, name="slow", description="Slow.", max_concurrency=1)]

    call = '<tool_call>\n{"name": "slow", "arguments": {"x": 1}}\n</tool_call>'
    # Two calls a turn, ten trajectories: 5 s of work in a queue.
    loop, _ = build(chat, [call + call + END, f"done{END}"], environment=Busy, env_timeout=2.5, rollout_batch_size=5)
    result = await loop.run(0)
    assert all(s.metadata["counters"]["tool_ok"] == 2 for group in result.groups for s in group)


@virtual_time
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


@pytest.mark.parametrize("most", [0, 2])
async def test_no_trajectory_is_restarted_more_often_than_allowed(chat: Chat, most: int) -> None:
    attempts: list[int] = []

    async def generate(args: Args, sample: Sample, params: object) -> Sample:
        attempts.append(sample.metadata.get("attempt", 0))
        raise ToolFailure("every time")

    loop, _ = build(
        chat,
        [],
        generate=generate,
        environment=None,
        failure_policy={Blame.TOOL: FailureAction.RETRY},
        rollout_max_retries=most,
        rollout_batch_size=1,
        n_samples_per_prompt=1,
    )
    with pytest.raises(AgentRLError, match="every time"):
        await loop.run(0)
    assert max(attempts) == most


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


@virtual_time
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


@pytest.mark.parametrize("group_rm", [False, True])
async def test_a_reward_function_sees_the_last_part_of_a_split_trajectory(chat: Chat, group_rm: bool) -> None:
    class Restarts(EchoEnv):
        async def step(self, turn: Turn) -> Step:
            again = turn.index == 1 and turn.sample.index == 0
            return Step(restart=[{"role": "user", "content": "summary"}]) if again else Step(done=True)

    seen: list[tuple[int | None, int]] = []

    def one(args: Args, sample: Sample) -> float:
        seen.append((sample.index, sample.model_turns))
        sample.metadata["step_credit"] = [0.5]
        return 0.5

    def group(args: Args, samples: list[Sample]) -> list[float]:
        return [one(args, sample) for sample in samples]

    reward = group if group_rm else one
    loop, _ = build(chat, [f"hello{END}"], environment=Restarts, reward=reward, group_rm=group_rm, rollout_batch_size=1)
    (parts,) = (await loop.run(0)).groups
    assert [(part.index, part.model_turns, part.reward) for part in parts] == [(0, 1, 0.5), (0, 2, 0.5), (1, 1, 0.5)]
    assert sorted(seen) == [(0, 2), (1, 1)]
    assert [part.metadata["step_credit"] for part in parts] == [[0.5]] * 3


async def fans_out(args: Args, sample: Sample, sampling_params: object) -> list[Sample]:
    return [Sample(tokens=[1, at], response_length=1, rollout_log_probs=[-1.0]) for at in (2, 3)]


async def test_a_reward_that_the_environment_set_before_a_restart_is_not_the_parts(chat: Chat) -> None:
    class Sets(EchoEnv):
        async def step(self, turn: Turn) -> Step:
            turn.sample.reward = float(turn.index)
            return Step(restart=[{"role": "user", "content": "summary"}]) if turn.index == 1 else Step(done=True)

    (group,) = (await build(chat, [f"hello{END}"], environment=Sets, rollout_batch_size=1)[0].run(0)).groups
    assert [sample.reward for sample in group] == [2.0] * 4


async def test_what_a_generate_function_returned_is_kept_if_grading_fails(chat: Chat) -> None:
    def fails(args: Args, sample: Sample) -> float:
        raise ValueError("no luck")

    policy = {Blame.GRADER: FailureAction.SCORE}
    more: dict[str, Any] = {"generate": fans_out, "environment": None, "rollout_batch_size": 1}
    (group,) = (await build(chat, [], reward=fails, failure_policy=policy, **more)[0].run(0)).groups
    assert [(sample.tokens[-1], sample.reward, sample.remove_sample) for sample in group] == [
        (2, 0.0, False),
        (3, 0.0, False),
    ] * 2
    assert all("failure" in sample.metadata for sample in group), "as gdpo asks"


async def test_a_group_reward_sees_all_that_a_samples_own_generate_function_made(chat: Chat) -> None:
    class Named(Store):
        def lease(self, n: int, version: int) -> list[list[Sample]]:
            groups = super().lease(n, version)
            for sample in (group[0] for group in groups):
                sample.generate_function_path = f"{__name__}:fans_out"
            return groups

    def last(args: Args, samples: list[Sample]) -> list[float]:
        return [float(sample.tokens[-1]) for sample in samples]

    more: dict[str, Any] = {"reward": last, "group_rm": True, "store": Named(), "rollout_batch_size": 1}
    (group,) = (await build(chat, [f"hello{END}"], **more)[0].run(0)).groups
    assert [sample.reward for sample in group[:2]] == [2.0, 3.0]
    assert len(group) == 3


@pytest.mark.parametrize("own", [False, True])
async def test_a_failed_sample_that_a_source_gives_again_is_played_and_graded_anew(chat: Chat, own: bool) -> None:
    """`own`: a generate function plays, and leaves out optional fields."""

    class Fails(EchoEnv):
        async def step(self, turn: Turn) -> Step:
            if turn.sample.index == 1 and not again:
                raise ModelFailure("unusable answer")
            return Step(done=True, info={"steps": 1})

        async def reward(self, sample: Sample) -> float:
            return 3.0

    async def generate(args: Args, sample: Sample, params: object) -> Sample:
        sample.tokens, sample.response_length, sample.rollout_log_probs = [1, 2], 1, [-1.0]
        sample.non_generation_time += 1.0
        sample.reward = 3.0
        return sample

    again, policy = False, {Blame.MODEL: FailureAction.KEEP_MASKED}
    loop, _ = build(chat, [f"hello{END}"], environment=Fails, failure_policy=policy)
    finished, failed = await loop.player.group(loop.store.lease(1, 0)[0], evaluation=False)
    assert (failed.reward, failed.remove_sample, "failure" in failed.metadata) == (0.0, True, True)
    failed.metadata["topic"], failed.rollout_id, failed.non_generation_time = "sums", finished.rollout_id, 50.0
    failed.spec_info.spec_verify_ct = 9
    before, again = finished.to_dict(), True
    if own:
        loop, _ = build(chat, [], generate=generate, environment=None, failure_policy=policy)
    kept, fresh = await loop.player.group([finished, failed], evaluation=False)
    assert kept.to_dict() == before
    assert (fresh.reward, fresh.remove_sample) == (3.0, False)
    assert (fresh.status, fresh.stop_reason) == (Status.COMPLETED, "done")
    assert fresh.non_generation_time < 50
    assert (fresh.spec_info.spec_verify_ct, fresh.metadata["topic"]) == (0, "sums")
    assert "failure" not in fresh.metadata
    assert fresh.trained_tokens == fresh.response_length == (1 if own else len(chat.encode(f"hello{END}")))
    assert fresh.metadata.get("counters") == (None if own else {"steps": 1})
    assert failed.reward == 0.0, "the lease is as it was"


def of_the_row(args: Args, sample: Sample) -> float:
    return 7.0


async def test_a_samples_own_reward_function_takes_the_place_of_the_environments(chat: Chat) -> None:
    class Named(Store):
        def lease(self, n: int, version: int) -> list[list[Sample]]:
            groups = super().lease(n, version)
            for sample in (group[0] for group in groups):
                sample.custom_rm_path = f"{__name__}:of_the_row"
            return groups

    loop, _ = build(chat, [f"hello{END}"], store=Named())
    assert [sample.reward for group in (await loop.run(0)).groups for sample in group] == [7.0, 1.0] * 3
