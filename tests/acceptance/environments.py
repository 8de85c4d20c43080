"""Broken and slow user code, and the expected reports.

1. A batch has three groups of two. The sample with index `CULPRIT` misbehaves; the other five are innocent and must
   finish as they would alone.
2. All failures are kept, masked, so that a batch shows which of its samples failed, and how.
3. `DEADLINE` seconds are allowed for every call of user code, far more than the innocents need. The culprit blocks the
   loop until the watchdog has reported it.
"""

import threading
from dataclasses import dataclass
from typing import Any

import anyio

from agentrl import Blame, Environment, Sample, Step, Turn, tool
from agentrl.sample import Message

CULPRIT = 1
DEADLINE = 2.0
released = threading.Event()
"""Set at the end of a test, so that a thread that hangs for the test ends too."""
reported = threading.Event()
"""Set when the watchdog has reported what blocks the loop."""


class Plain(Environment):
    """Awaits a few times in a step, like a small database query: a blocked loop delays it."""

    max_turns = 2

    async def reset(self, sample: Sample) -> list[Message]:
        self.index = sample.index
        return await super().reset(sample)

    @property
    def guilty(self) -> bool:
        return self.index == CULPRIT

    async def step(self, turn: Turn) -> Step:
        for _ in range(4):
            await anyio.sleep(0.02)
        return await super().step(turn)

    async def reward(self, sample: Sample) -> float | dict[str, Any]:
        return 1.0


class BlocksInStep(Plain):
    async def step(self, turn: Turn) -> Step:
        await anyio.sleep(0.03)
        if self.guilty:
            reported.wait(60)
        return await super().step(turn)


class BlocksInReset(Plain):
    async def reset(self, sample: Sample) -> list[Message]:
        if sample.index == CULPRIT:
            reported.wait(60)
        return await super().reset(sample)


class BlocksInReward(Plain):
    async def reward(self, sample: Sample) -> float | dict[str, Any]:
        if self.guilty:
            reported.wait(60)
        return 1.0


class SpinsInStep(Plain):
    """Computes in Python instead of sleeping."""

    async def step(self, turn: Turn) -> Step:
        await anyio.sleep(0.03)
        while self.guilty and not reported.is_set():
            pass
        return await super().step(turn)


class BlocksInTool(Plain):
    @tool(timeout=DEADLINE)
    async def look(self) -> str:
        """Look."""
        if self.guilty:
            reported.wait(60)
        await anyio.sleep(0.02)
        return "seen"


class HangsInStep(Plain):
    async def step(self, turn: Turn) -> Step:
        if self.guilty:
            await anyio.sleep_forever()
        return await super().step(turn)


class HangsInClose(Plain):
    async def close(self) -> None:
        if self.guilty:
            await anyio.sleep_forever()


class HangingSyncTool(Plain):
    @tool(timeout=DEADLINE / 3)
    def look(self) -> str:
        """Look."""
        if self.guilty:
            released.wait(10)
        return "seen"


class RaisesInReset(Plain):
    async def reset(self, sample: Sample) -> list[Message]:
        if sample.index == CULPRIT:
            raise OSError("no such index")
        return await super().reset(sample)


class RaisesInStep(Plain):
    async def step(self, turn: Turn) -> Step:
        if self.guilty:
            raise KeyError("row 7")
        return await super().step(turn)


class RaisesInReward(Plain):
    async def reward(self, sample: Sample) -> float | dict[str, Any]:
        return 1.0 / (not self.guilty)


class RaisesInClose(Plain):
    async def close(self) -> None:
        if self.guilty:
            raise RuntimeError("already closed")


class ResetReturnsGarbage(Plain):
    async def reset(self, sample: Sample) -> list[Message]:
        messages = await super().reset(sample)
        return {"role": "user"} if self.guilty else messages  # type: ignore[return-value]


class StepReturnsNothing(Plain):
    async def step(self, turn: Turn) -> Step:
        step = await super().step(turn)
        return None if self.guilty else step  # type: ignore[return-value]


class MutatesTheSample(Plain):
    """Removes tokens that the model has written: the lengths disagree from then on."""

    def __init__(self) -> None:
        self.sample = Sample()

    async def reset(self, sample: Sample) -> list[Message]:
        self.sample = sample
        return await super().reset(sample)

    async def step(self, turn: Turn) -> Step:
        if self.guilty:
            del self.sample.tokens[-1:]
        return await super().step(turn)


class HugeMessage(Plain):
    """More text than any context holds."""

    async def step(self, turn: Turn) -> Step:
        if self.guilty:
            return Step([{"role": "user", "content": "a b c d " * 2_000}])
        return await super().step(turn)


class StrayTask(Plain):
    """Raises the exception that means cancellation to the loop, without a cancellation."""

    async def step(self, turn: Turn) -> Step:
        if self.guilty:
            raise anyio.get_cancelled_exc_class()("from user code")
        return await super().step(turn)


@dataclass(frozen=True)
class Seen:
    """The expected report of the culprit. The innocents must always succeed.

    Attributes:
        blame: of the culprit's failure; None if it succeeds.
        names: patterns that the failure's message matches.
        either: the culprit may fail or succeed, but must be reported.
        reported: patterns that one warning of the log matches.
        calls: the model calls the tool `look` first.
    """

    environment: type[Plain]
    blame: Blame | None = None
    names: tuple[str, ...] = ()
    either: bool = False
    reported: tuple[str, ...] = ()
    calls: bool = False


def blocks(environment: type[Plain], where: str, *, calls: bool = False) -> Seen:
    """Blocked the loop: a report with class, line, sample and seconds."""
    reported = (
        "tool look" if calls else rf"{environment.__name__}\.{where}",
        r"environments\.py:\d+",
        rf"sample {CULPRIT}\b",
        r"\d\.\d* s\b",
    )
    return Seen(environment, either=True, reported=reported, calls=calls)


def fails(environment: type[Plain], blame: Blame, *names: str) -> Seen:
    """Failed: the message names the trajectory."""
    return Seen(environment, blame, (*names, "group 0", f"sample {CULPRIT}"))


TURN = r"turn \d"
ENVIRONMENTS = {
    "blocks in step": blocks(BlocksInStep, "step"),
    "blocks in reset": blocks(BlocksInReset, "reset"),
    "blocks in reward": blocks(BlocksInReward, "reward"),
    "spins in step": blocks(SpinsInStep, "step"),
    "blocks in an async tool": blocks(BlocksInTool, "look", calls=True),
    "hangs in step": fails(HangsInStep, Blame.ENV, rf"HangsInStep\.step took longer than {DEADLINE:g} s", TURN),
    "hangs in close": fails(HangsInClose, Blame.ENV, r"HangsInClose\.close took longer than"),
    "raises in reset": fails(RaisesInReset, Blame.ENV, r"RaisesInReset\.reset raised OSError: .*\.py:\d"),
    "raises in step": fails(RaisesInStep, Blame.ENV, r"step raised KeyError: 'row 7' at .*\.py:\d", TURN),
    "raises in reward": fails(RaisesInReward, Blame.GRADER, r"RaisesInReward\.reward raised ZeroDivisionError"),
    "raises in close": fails(RaisesInClose, Blame.ENV, r"RaisesInClose\.close raised RuntimeError: already closed"),
    "reset returns garbage": fails(
        ResetReturnsGarbage, Blame.ENV, r"ResetReturnsGarbage\.reset must return a list of messages"
    ),
    "step returns nothing": fails(StepReturnsNothing, Blame.ENV, r"StepReturnsNothing\.step must return a Step", TURN),
    "mutates the sample": fails(MutatesTheSample, Blame.ENV, "MutatesTheSample", TURN),
    "raises a cancellation": fails(StrayTask, Blame.ENV, r"StrayTask\.step", TURN),
    "a huge message": Seen(HugeMessage),
    "a sync tool that hangs": Seen(HangingSyncTool, calls=True),
}
"""By name. A huge message truncates its trajectory and a hung tool is an observation: neither is a failure."""


class NeitherKeptNorReplayed(Plain):
    """Declares that it can neither be kept between two model turns nor be replayed: it can only be refused."""

    when_interrupted = "none"  # type: ignore[assignment]


class ReplayDiffers(Plain):
    """Declares that it can be replayed, and answers the same turn with another text each time. The text of an earlier
    play may not be in trained samples."""

    when_interrupted = "replay"
    played = 0

    async def reset(self, sample: Sample) -> list[Message]:
        type(self).played += 1
        self.play = self.played
        return await super().reset(sample)

    async def step(self, turn: Turn) -> Step:
        return Step([{"role": "user", "content": f"play {self.play}."}])


CHOICES = {
    "neither kept nor replayed": (NeitherKeptNorReplayed, ("NeitherKeptNorReplayed", "keep|replay|restart")),
    "an unknown choice": (type("Unknown", (Plain,), {"when_interrupted": "pray"}), ("Unknown", "pray", "replay")),
}
"""Environments that are refused at loading, and the names in the error."""
