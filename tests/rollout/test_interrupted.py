"""An environment whose trajectory is paused between two rollouts."""

from collections.abc import Sequence
from typing import Any, ClassVar

import anyio
import pytest

from agentrl import Sample, Step
from agentrl.chat import Chat
from agentrl.engine.wire import Generation, SamplingParams
from agentrl.envs import Turn
from agentrl.envs.base import WhenInterrupted
from agentrl.errors import EnvFailure
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.rewards import Grader
from agentrl.rollout.stats import RolloutStats, Tally
from agentrl.sample import Message
from tests.rollout.scripted import END, EchoEnv, ScriptedEngine, make_context
from tests.support.virtual_time import virtual_time


class Held(ScriptedEngine):
    """Pauses during one request until all other tasks wait. Then the request continues."""

    def __init__(self, chat: Chat, replies: Sequence[str], when: int, *, updates: bool) -> None:
        super().__init__(chat, replies)
        self.when, self.updates, self.alive = when, updates, -1

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, **options: Any) -> Generation:
        if len(self.calls) + 1 == self.when:
            self.pause_gate.close(between_rollouts=not self.updates)
            self.when = 0
            try:
                await anyio.wait_all_tasks_blocked()
                self.alive = Counting.opened - Counting.closed
            finally:
                self.pause_gate.open()
        return await super().generate(input_ids, params, **options)


class Counting(EchoEnv):
    """A game of three turns; it counts its instances."""

    opened: ClassVar[int] = 0
    closed: ClassVar[int] = 0
    seed: ClassVar[int] = 0

    def __init__(self) -> None:
        Counting.opened += 1
        self.turns = 0
        self.born = Counting.opened

    async def reset(self, sample: Sample) -> list[Message]:
        sample.metadata.setdefault("log", []).append("reset")
        self.log: list[str] = sample.metadata["log"]
        return await super().reset(sample)

    async def step(self, turn: Turn) -> Step:
        self.turns += 1
        self.log.append(f"step {self.turns}")
        answer: Message = {"role": "user", "content": f"turn {self.turns} {self.seed * self.born}"}
        return Step([answer], reward=1.0, info={"moves": 1}, done=self.turns == 3)

    async def close(self) -> None:
        Counting.closed += 1


class Again(Counting):
    when_interrupted: ClassVar[WhenInterrupted] = "replay"


class Chance(Again):
    seed = 1


class Anew(Counting):
    when_interrupted: ClassVar[WhenInterrupted] = "restart"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Counting.opened = Counting.closed = 0


async def play(
    chat: Chat, environment: type[Counting], when: int = 2, *, updates: bool = False
) -> tuple[Sample, Held, RolloutStats]:
    engine, tally = Held(chat, [f"a{END}", f"b{END}", f"c{END}"], when, updates=updates), Tally()
    context = make_context(chat, engine, environment)
    player = GroupPlayer(context, Grader(context.settings, context.args))
    with anyio.fail_after(120):
        (sample,) = await player.group([Sample(group_index=1, index=2, prompt="q")], evaluation=False, tally=tally)
    assert Counting.closed == Counting.opened
    return sample.validate(), engine, tally.stats


@pytest.mark.parametrize("when", [0, 2, 3])
async def test_an_environment_that_is_kept_continues_after_the_pause(chat: Chat, when: int) -> None:
    sample, engine, _ = await play(chat, Counting, when)
    assert Counting.opened == 1
    assert engine.alive == (1 if when else -1)
    assert sample.metadata["counters"] == {"moves": 3}


@pytest.mark.parametrize("when", [1, 2, 3])
async def test_a_replay_leaves_the_same_sample(chat: Chat, when: int) -> None:
    plain, _, _ = await play(chat, Counting, 0)
    Counting.opened = Counting.closed = 0
    sample, engine, stats = await play(chat, Again, when)
    assert (Counting.opened, engine.alive) == (2, 0)  # none during the pause
    assert sample.tokens == plain.tokens
    for name in ("counters", "step_rewards", "messages", "log"):
        assert sample.metadata[name] == plain.metadata[name]
    assert not stats.failures


async def test_a_replay_that_differs_is_a_failure_that_says_where(chat: Chat) -> None:
    with pytest.raises(EnvFailure, match=r"^group 1, sample 2, turn 3: Chance.step of turn 1 gave a different") as e:
        await play(chat, Chance, 3)
    assert e.value.kind == "replay_differs"
    assert (
        "message 0 was {'role': 'user', 'content': 'turn 1 1'}, now it is {'role': 'user', 'content': 'turn 1 2'}"
        in str(e.value)
    )
    assert Counting.closed == Counting.opened == 2


async def test_a_restart_is_the_same_attempt_once_more(chat: Chat) -> None:
    sample, _, stats = await play(chat, Anew, 2)
    assert (Counting.opened, stats.retries) == (2, 0)
    assert "attempt" not in sample.metadata
    assert sample.metadata["counters"] == {"moves": 3}
    assert sample.metadata["log"] == ["reset", "step 1", "step 2", "step 3"]
    first = len(chat.encode(f"a{END}"))
    assert stats.tokens.lost == {"restarted": first}
    assert stats.tokens.left == sample.trained_tokens


@pytest.mark.parametrize("environment", [Counting, Again, Anew])
async def test_a_weight_update_leaves_every_environment_alone(chat: Chat, environment: type[Counting]) -> None:
    sample, engine, stats = await play(chat, environment, updates=True)
    assert (Counting.opened, engine.alive) == (1, 1)
    assert not stats.tokens.lost
    assert sample.metadata["log"] == ["reset", "step 1", "step 2", "step 3"]


@virtual_time
async def test_a_pause_does_not_count_against_the_trajectorys_timeout(chat: Chat) -> None:
    class Long(ScriptedEngine):
        async def generate(self, input_ids: Sequence[int], params: SamplingParams, **options: Any) -> Generation:
            self.pause_gate.close()
            await anyio.sleep(0.25)
            self.pause_gate.open()
            return await super().generate(input_ids, params, **options)

    context = make_context(chat, Long(chat, [f"a{END}"]), EchoEnv, trajectory_timeout=0.2)
    player, tally = GroupPlayer(context, Grader(context.settings, context.args)), Tally()
    await player.group([Sample(group_index=1, index=2, prompt="q")], evaluation=False, tally=tally)
    assert not tally.stats.failures
