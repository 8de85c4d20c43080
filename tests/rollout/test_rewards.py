"""Built-in graders in the rollout: through the session's processes, in training and in evaluation."""

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl import Environment, Sample
from agentrl.chat import Chat
from agentrl.errors import GraderFailure
from agentrl.rm_hub import GraderRunner, RmHubSettings, async_rm
from agentrl.rollout.functions import GenerateFunction, RewardFunction
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.rewards import Grader, check_reward
from tests.rollout.scripted import END, OneBatch, ScriptedEngine, Store, build, make_context
from tests.support.evaluating import evaluate
from tests.support.nightly import nightly

FAULTY = str(Path(__file__).parent.parent / "support" / "faulty_graders.py")


def make_runner(
    chat: Chat, graders: GraderRunner, answer: str = "Paris", reward: Any = None, generate: Any = None, **settings: Any
) -> GroupPlayer:
    settings = {"rollout_batch_size": 3, "n_samples_per_prompt": 2, **settings}
    context = make_context(chat, ScriptedEngine(chat, [answer + END]), Environment, **settings)
    function = None if reward is None else RewardFunction.of(reward, "my reward", group=context.settings.group_rm)
    own = None if generate is None else GenerateFunction.of(generate, "my generate")
    return GroupPlayer(context, Grader(context.settings, context.args, function, graders), own)


def prompts(count: int, label: str = "Paris", **metadata: Any) -> list[list[Sample]]:
    return [
        [
            Sample(group_index=g, index=2 * g + i, prompt="Where?", label=label, metadata=dict(metadata))
            for i in range(2)
        ]
        for g in range(count)
    ]


class Labelled(Store):
    """Prompts with a label; group 1 has its own, bad grader."""

    def __init__(self, bad: str) -> None:
        super().__init__()
        self.bad = bad

    def lease(self, n: int, step: int) -> list[list[Sample]]:
        groups = super().lease(n, step)
        for group in groups:
            for sample in group:
                sample.label = "Paris"
                if sample.group_index == 1:
                    sample.metadata["rm_type"] = self.bad
        return groups


async def test_environments_are_graded_by_the_sessions_processes(chat: Chat) -> None:
    async with GraderRunner(RmHubSettings(grader_processes=1)) as graders:
        result = await evaluate(make_runner(chat, graders, rm_type="exact_match"), "held-out", prompts(4))
        assert graders.pool.started == 1
    assert result.metrics["reward"] == 1.0
    assert result.groups[0][0].metadata["grade"]["correct"] is True


@pytest.mark.parametrize(
    ("bad", "kind"),
    nightly([("segfaults", "grader_crashed"), ("sleeps", "grader_timeout"), ("raises", "grader_raised")], 1),
)
async def test_failures_of_graders_are_counted_and_neighbours_go_on(chat: Chat, bad: str, kind: str) -> None:
    store = Labelled(f"{FAULTY}:{bad}")
    async with GraderRunner(RmHubSettings(grader_processes=2, grader_timeout=2.0)) as graders:
        runner = make_runner(chat, graders, answer="60" if bad == "sleeps" else "Paris", rm_type="exact_match")
        result = await OneBatch(runner, store).run(0)
    assert store.fate[1] == f"dropped:grader/{kind}"
    assert result.stats.failures[f"grader/{kind}"] >= 1
    if bad == "raises":
        assert re.search(r"raised \w+: .* at \S*faulty_graders.py:\d+ in raises", result.stats.last_failure)
    assert len(result.groups) == 3


async def test_a_slow_queue_is_not_a_slow_grader(chat: Chat) -> None:
    async with GraderRunner(RmHubSettings(grader_processes=1)) as graders:
        runner = make_runner(chat, graders, answer="0.2", rm_type=f"{FAULTY}:sleeps", reward_timeout=0.5)
        result = await evaluate(runner, "held-out", prompts(4))
    assert result.metrics["samples"] == 8
    assert result.metrics["reward"] == 1.0


@pytest.mark.slow
async def test_dict_rewards_and_their_keys(chat: Chat) -> None:
    async with GraderRunner(RmHubSettings(grader_processes=1)) as graders:
        keys = {"reward_key": "score", "eval_reward_key": "half"}
        runner = make_runner(chat, graders, answer="0", rm_type=f"{FAULTY}:sleeps", **keys)
        result = await evaluate(runner, "held-out", prompts(1))
    assert result.groups[0][0].reward == {"score": 1.0, "half": 0.5}
    assert result.metrics["reward"] == 0.5


@pytest.mark.parametrize(
    ("reward", "key", "kept"), [(True, None, 1.0), (False, None, 0.0), ({"a": True}, "a", {"a": True})]
)
def test_a_verdict_is_a_reward(reward: Any, key: str | None, kept: Any) -> None:
    sample = Sample(reward=reward)
    check_reward(sample, "")
    assert (sample.reward, type(sample.reward)) == (kept, type(kept))
    assert sample.get_reward_value(key) == float(reward["a"] if key else reward)


@pytest.mark.parametrize("reward", [{"score": None}, {"score": "1"}, {"other": 1.0}])
@pytest.mark.parametrize("by_group", [False, True])
async def test_a_dict_without_a_usable_entry_is_the_graders_failure(chat: Chat, reward: Any, by_group: bool) -> None:
    def graded(sample: Sample) -> Any:
        return reward if sample.group_index == 1 else {"score": 1.0}

    async def one(args: Any, sample: Sample) -> Any:
        return graded(sample)

    async def every(args: Any, samples: list[Sample]) -> list[Any]:
        return [graded(sample) for sample in samples]

    store = Store()
    batch, _ = build(
        chat,
        [f"fine{END}"],
        reward=every if by_group else one,
        store=store,
        reward_key="score",
        group_rm=by_group,
    )
    result = await batch.run(0)
    assert store.fate[1] == "dropped:grader/grader_bad_reward"
    assert len(result.groups) == 3
    assert "cannot be used: " in result.stats.last_failure


async def test_group_rewards_see_whole_groups_in_evaluation_too(chat: Chat) -> None:
    seen: list[int] = []

    async def rank(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
        seen.append(len(samples))
        return [float(sample.index or 0) for sample in samples]

    async with GraderRunner() as graders:
        result = await evaluate(make_runner(chat, graders, reward=rank, group_rm=True), "held-out", prompts(3))
    assert seen == [2, 2, 2]
    assert [sample.reward for group in result.groups for sample in group] == [0, 1, 2, 3, 4, 5]


async def test_users_code_that_calls_async_rm_uses_the_sessions_processes(chat: Chat) -> None:
    async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
        score = await async_rm(args, sample)
        assert isinstance(score, float)
        return score / 2

    async with GraderRunner(RmHubSettings(grader_processes=1)) as graders:
        result = await evaluate(make_runner(chat, graders, reward=reward, rm_type="exact_match"), "x", prompts(2))
        assert graders.pool.started == 1
    assert result.metrics["reward"] == 0.5


async def test_own_loops_are_graded_by_the_built_in_grader(chat: Chat) -> None:
    async def generate(args: Any, samples: list[Sample]) -> list[Sample]:
        for sample in samples:
            sample.set_prompt_tokens([1])
            sample.append_model([2], [-0.1], text="Paris")
        return samples

    async with GraderRunner(RmHubSettings(grader_processes=1)) as graders:
        runner = make_runner(chat, graders, generate=generate)
        by_sample = await evaluate(runner, "x", prompts(2, rm_type="exact_match"))
        assert by_sample.metrics["reward"] == 1.0
        nothing = await evaluate(runner, "x", prompts(1))
        assert nothing.metrics == {"samples": 0.0, "failed_groups": 1.0}
        with pytest.raises(GraderFailure, match="nothing grades it"):
            await Grader(runner.context.settings, runner.context.args, None, graders).grade([Sample(response="x")])


async def test_plain_reward_functions_do_not_crowd_each_other_out(chat: Chat) -> None:
    counts = {"now": 0, "most": 0}
    lock = threading.Lock()

    def reward(args: Any, sample: Sample) -> float:
        with lock:
            counts["now"] += 1
            counts["most"] = max(counts.values())
        time.sleep(0.01)
        with lock:
            counts["now"] -= 1
        return 1.0

    loop, _ = build(chat, [f"x{END}"], reward=reward, rollout_batch_size=60)
    result = await loop.run(0)
    assert len(result.groups) == 60
    assert counts["most"] <= 32
