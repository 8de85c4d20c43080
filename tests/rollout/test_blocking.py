"""One trajectory that blocks the event loop: it fails, the others do not, and the message names it."""

import asyncio
import time

import anyio
import anyio.lowlevel
import pytest

from agentrl import Sample, Step, clock, tool
from agentrl.chat import Chat
from agentrl.clock import Watchdog
from agentrl.envs import Turn
from agentrl.errors import Blame, EnvFailure
from agentrl.rollout.settings import FailureAction
from agentrl.rollout.stats import Tally
from agentrl.tools import Tool
from agentrl.tools.threads import ToolThreads
from tests.rollout.scripted import END, EchoEnv, build

CALL = f'<tool_call>\n{{"name": "look", "arguments": {{}}}}\n</tool_call>{END}'


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "BEAT", 0.03)


def block() -> None:
    time.sleep(1.4)


class Innocents(EchoEnv):
    """Sample 5 blocks; all the others need two awaits and little time."""

    async def step(self, turn: Turn) -> Step:
        if turn.sample.index == 5:
            await anyio.lowlevel.checkpoint()
            block()
            return Step(done=True)
        await anyio.sleep(0.01)
        await anyio.sleep(0.01)
        return Step(done=True)


async def test_the_culprit_fails_and_the_innocents_pass(chat: Chat) -> None:
    policy = {Blame.ENV: FailureAction.KEEP_MASKED}
    loop, _ = build(chat, [f"hello{END}"], environment=Innocents, env_timeout=1.0, failure_policy=policy)
    tally = Tally()
    group = [Sample(group_index=3, index=at, prompt="q") for at in range(40)]
    with Watchdog.watching(10):
        played = await loop.player.group(group, evaluation=False, tally=tally)
    assert tally.stats.failures == {"env/env_timeout": 1}
    (failed,) = [sample for sample in played if "failure" in sample.metadata]
    assert failed.index == 5
    said = failed.metadata["failure"]["message"]
    assert said.startswith("group 3, sample 5, turn 1: Innocents.step took longer than 1 s: it blocked the event loop")
    assert f"{__file__}:" in said


class Raising(EchoEnv):
    tools = [Tool(lambda: "seen", name="look", description="Look.")]

    async def step(self, turn: Turn) -> Step:
        if turn.index == 2 and turn.sample.index == 1:
            raise OSError("the disk is gone")
        return await super().step(turn)


async def test_the_error_that_ends_a_run_says_where(chat: Chat) -> None:
    loop, _ = build(chat, [CALL, f"done{END}"], environment=Raising)
    with pytest.raises(EnvFailure, match=r"^group 0, sample 1, turn 2: Raising.step raised OSError: the disk is gone"):
        await loop.run(0)


async def test_what_fails_for_a_whole_group_names_the_group(chat: Chat) -> None:
    async def reward(args: object, samples: list[Sample]) -> list[float]:
        raise ValueError("no")

    policy = {Blame.GRADER: FailureAction.RAISE}
    loop, _ = build(chat, [f"x{END}"], reward=reward, group_rm=True, failure_policy=policy, rollout_batch_size=1)
    with pytest.raises(Exception, match=r"^group 0, turn 0: my reward raised ValueError: no"):
        await loop.run(0)


class Resource(EchoEnv):
    """Counts what is open, and reports when a trajectory has reached `where`."""

    where, opened, closed = "", 0, 0
    there = asyncio.Event()

    def __init__(self) -> None:
        type(self).opened += 1

    @tool
    async def look(self) -> str:
        """Look."""
        await self.come("tool")
        return "seen"

    async def come(self, where: str) -> None:
        if where == self.where:
            self.there.set()
            await anyio.sleep_forever()

    async def reset(self, sample: Sample) -> list[dict[str, object]]:
        await self.come("reset")
        return await super().reset(sample)

    async def reward(self, sample: Sample) -> float:
        await self.come("reward")
        return 1.0

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
        type(self).closed += 1


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("where", ["reset", "tool", "reward", "model"])
async def test_nothing_is_stranded_by_a_cancellation_of_either_kind(chat: Chat, where: str, native: bool) -> None:
    Resource.where, Resource.opened, Resource.closed, Resource.there = where, 0, 0, asyncio.Event()

    async def forever() -> None:
        Resource.there.set()
        await anyio.sleep_forever()

    replies = [forever] if where == "model" else [CALL, f"done{END}"]
    loop, _ = build(chat, replies, environment=Resource)
    group = [Sample(group_index=0, index=at, prompt="q") for at in range(4)]
    tasks_before = asyncio.all_tasks()
    playing = loop.player.group(group, evaluation=False)
    if native:
        task = asyncio.ensure_future(playing)
        await Resource.there.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        async with anyio.create_task_group() as tasks:

            async def play() -> None:
                await playing

            tasks.start_soon(play)
            await Resource.there.wait()
            tasks.cancel_scope.cancel()
    assert Resource.closed == Resource.opened > 0
    assert asyncio.all_tasks() == tasks_before
    assert loop.player.limit.borrowed_tokens == 0
    assert ToolThreads.current().places.borrowed_tokens == 0
