"""Mistakes that every group would meet: the run stops after the first groups, and says what to repair and where."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl import Environment, Sample
from agentrl.chat import Chat
from agentrl.errors import AgentRLError, Blame, GraderFailure
from agentrl.rollout.failures import DropGroup
from agentrl.rollout.settings import FailureAction
from agentrl.rollout.startup_check import FIRST_GROUPS, StartupCheck
from agentrl.rollout.stats import RolloutStats, Tally
from tests.rollout.scripted import END, EchoEnv, Reply, Store, build
from tests.support.evaluating import evaluate

HERE = Path(__file__).name
FIRST = f"no trajectory of the first {FIRST_GROUPS} groups could be graded: group \\d+, sample \\d+, turn 1: "


def parses(args: Any, sample: Sample) -> float:
    return float(json.loads(sample.response)["score"])


def words(args: Any, sample: Sample) -> Any:
    return "good"


def forgets(args: Any, sample: Sample) -> Any:
    parsed = len(sample.response)  # noqa: F841


def divides(args: Any, sample: Sample) -> float:
    return float("nan")


def _line(function: Any) -> int:
    line: int = function.__code__.co_firstlineno
    return line


BAD: list[tuple[Callable[..., Any], str]] = [
    (parses, rf"my reward raised JSONDecodeError: .* at \S*{HERE}:{_line(parses) + 1} in parses"),
    (words, rf"my reward \(\S*{HERE}:{_line(words)}\): the reward of sample .* must be a finite number .*, got 'good'"),
    (forgets, rf"my reward \(\S*{HERE}:{_line(forgets)}\): .*, got None; every way through it ends in a return"),
    (divides, rf"my reward \(\S*{HERE}:{_line(divides)}\): .*, got nan"),
]


@pytest.mark.parametrize("action", [FailureAction.DROP_GROUP, FailureAction.SCORE, FailureAction.RETRY])
@pytest.mark.parametrize(("reward", "message"), BAD)
async def test_a_reward_that_always_fails_stops_the_run(
    chat: Chat, reward: Callable[..., Any], message: str, action: FailureAction
) -> None:
    store = Store()
    loop, _ = build(chat, [f"x{END}"], reward=reward, store=store, failure_policy={Blame.GRADER: action})

    async def run() -> None:
        for step in range(5):
            await loop.run(step)

    with pytest.raises(AgentRLError, match=FIRST + message):
        await run()
    assert len(store.fate) <= FIRST_GROUPS + 3


async def test_so_does_the_reward_of_an_environment_or_of_a_generate_function(chat: Chat) -> None:
    class Graded(Environment):
        async def reward(self, sample: Sample) -> Any:
            return None

    async def generate(args: Any, samples: list[Sample]) -> list[Sample]:
        for sample in samples:
            sample.set_prompt_tokens([1])
            sample.append_model([2], [-1.0], "0")
            sample.reward = float("inf")
        return samples

    loop, _ = build(chat, [f"x{END}"], environment=Graded)
    with pytest.raises(AgentRLError, match=rf"{FIRST}Graded.reward \(\S*{HERE}:\d+\): .*, got None"):
        await loop.run(0)
    loop, _ = build(chat, [], environment=None, generate=generate)
    with pytest.raises(
        AgentRLError, match=rf"groups could be graded: group \d+, turn 0: my generate \(\S*{HERE}:\d+\): .*got inf"
    ):
        await loop.run(0)


async def test_a_reward_for_whole_groups_too(chat: Chat) -> None:
    def reward(args: Any, samples: list[Sample]) -> list[float]:
        return [1.0 / 0.0 for _ in samples]

    loop, _ = build(chat, [f"x{END}"], reward=reward, group_rm=True)
    with pytest.raises(AgentRLError, match=r"could be graded: group \d+, turn 0: my reward raised ZeroDivisionError"):
        await loop.run(0)


async def test_one_graded_trajectory_is_enough_for_the_failure_policy(chat: Chat) -> None:
    """The seventh sample is graded, though its group is dropped: later groups may fail as the policy allows."""

    async def reward(args: Any, sample: Sample) -> float:
        if sample.index == 7:
            await anyio.sleep(0.2)
        return 1.0 / (sample.index == 6 or (sample.group_index or 0) > 20)

    loop, _ = build(chat, [f"x{END}"], reward=reward)
    played = await loop.run(0)
    assert [group[0].group_index for group in played.groups] == [21, 22, 23]


async def test_the_first_groups_are_those_that_began_first(chat: Chat) -> None:
    """Short answers fail, and end before the long one, which does not fail."""
    wait = anyio.Event()

    def replies(key: str) -> list[Reply]:
        async def long() -> str:
            await wait.wait()
            return f"a long answer{END}"

        return [long] if key.startswith("0-") else [f"x{END}"]

    async def reward(args: Any, sample: Sample) -> float:
        if sample.group_index == 20:
            wait.set()
        return 1.0 / ((sample.group_index or 0) not in range(1, 21))

    loop, _ = build(chat, replies, reward=reward)
    played = await loop.run(0)
    assert 0 in [group[0].group_index for group in played.groups]


def test_a_group_that_was_broken_off_says_nothing() -> None:
    startup_check, tally = StartupCheck(), Tally()
    tally.stats += RolloutStats.of(GraderFailure("no reward"))

    def plays(raised: Exception) -> None:
        with startup_check.playing(tally):
            raise raised

    for _ in range(FIRST_GROUPS):
        with pytest.raises(OSError, match="gone"):
            plays(OSError("gone"))
    for _ in range(FIRST_GROUPS - 1):
        with pytest.raises(DropGroup):
            plays(DropGroup("grader"))
    with pytest.raises(
        AgentRLError, match=f"no trajectory of the first {FIRST_GROUPS} groups could be graded: no reward"
    ):
        plays(DropGroup("grader"))


async def test_prompts_that_never_fit_stop_the_run_and_some_do_not(chat: Chat) -> None:
    loop, engine = build(chat, [f"x{END}"], rollout_max_prompt_len=3)
    with pytest.raises(
        AgentRLError, match=rf"no prompt of the first {FIRST_GROUPS} groups fits: .*at most 3 fit.*--roll"
    ):
        await loop.run(0)
    assert engine.calls == []

    class Mixed(EchoEnv):
        async def reset(self, sample: Sample) -> list[Any]:
            return [{"role": "user", "content": "q" if sample.index == 15 else "q" * 400}]

    loop, _ = build(chat, [f"x{END}"], environment=Mixed, rollout_max_prompt_len=100)
    with pytest.raises(AgentRLError, match=r"5\d groups in a row"):
        await loop.run(0)


async def test_evaluations_are_stopped_too_however_few_their_prompts(chat: Chat) -> None:
    loop, _ = build(chat, [f"x{END}"], reward=words)
    with pytest.raises(AgentRLError, match="no trajectory of the first 2 groups could be graded: .*'good'"):
        await evaluate(loop.player, "held-out", Store().lease(2, 0))

    def later(args: Any, sample: Sample) -> Any:
        return 1.0 if sample.group_index == 0 else "good"

    loop, _ = build(chat, [f"x{END}"], reward=later)
    assert (await evaluate(loop.player, "held-out", Store().lease(1, 0))).metrics["reward"] == 1.0
    assert (await evaluate(loop.player, "held-out", Store().lease(40, 0)[1:])).metrics["samples"] == 0
