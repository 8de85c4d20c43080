"""Environments that a check plays, each with one mistake."""

import asyncio
import os
import random
import threading
import time
import traceback
from typing import Any, ClassVar

import anyio

from agentrl import Environment, Sample, Step, Turn, tool
from agentrl.sample import Message


class Sound(Environment):
    """No mistake, but everything that looks like one: chance from the sample, state on the instance, a slow tool."""

    max_turns = 4
    secret = 0

    async def reset(self, sample: Sample) -> list[Message]:
        self.secret = random.Random(f"{sample.group_index}").randrange(100)
        return [{"role": "system", "content": "Look before you answer."}, *await super().reset(sample)]

    @tool
    async def look(self, where: str, far: bool = False) -> dict[str, Any]:
        """Look somewhere.

        Args:
            where: the place
            far: use the telescope
        """
        await anyio.sleep(0.01)
        return {"where": where, "seen": self.secret}

    async def reward(self, sample: Sample) -> float:
        return float(str(sample.label) in sample.response)


class Blocks(Sound):
    async def step(self, turn: Turn) -> Step:
        time.sleep(0.7)  # noqa: ASYNC251
        return await super().step(turn)


class Hangs(Sound):
    async def step(self, turn: Turn) -> Step:
        await anyio.sleep_forever()
        return Step(done=True)


class HangsInClose(Sound):
    async def close(self) -> None:
        await anyio.sleep_forever()


class HangsInThread(Sound):
    @tool
    def wait(self) -> str:
        """Wait."""
        threading.Event().wait(8)
        return ""


class Swallows(Sound):
    async def step(self, turn: Turn) -> Step:
        try:
            await anyio.sleep(0.05)
        except BaseException:  # noqa: BLE001
            return Step(done=True)
        return await super().step(turn)


class Shares(Sound):
    seen: ClassVar[list[str]] = []

    async def reset(self, sample: Sample) -> list[Message]:
        self.seen.append("x")
        return [{"role": "user", "content": "".join(self.seen)}]


class Race(Sound):
    """Alone it is always the same."""

    current: ClassVar[str | None] = ""

    async def step(self, turn: Turn) -> Step:
        type(self).current = turn.text
        await anyio.sleep(0.02)
        return Step([{"role": "user", "content": f"You said: {self.current}"}], done=turn.index == 2)


class ByIndex(Sound):
    async def reset(self, sample: Sample) -> list[Message]:
        return [{"role": "user", "content": f"Count to {sample.index}."}]


class Speaks(Sound):
    async def step(self, turn: Turn) -> Step:
        return Step([{"role": "assistant", "content": "I see."}, {"role": "user", "content": "Go on."}])


class OneAnswer(Sound):
    async def step(self, turn: Turn) -> Step:
        return Step([{"role": "tool", "content": "seen"}]) if turn.tool_calls else Step(done=True)


class Rewrites(Sound):
    async def reward(self, sample: Sample) -> float:
        sample.tokens[-1] = 7
        return float(len(sample.response))


class Unkept(Sound):
    async def reset(self, sample: Sample) -> list[Message]:
        sample.metadata["board"] = object()
        return await super().reset(sample)


class Pleased(Sound):
    async def reward(self, sample: Sample) -> float:
        return 1.0


class Backwards(Sound):
    async def reward(self, sample: Sample) -> float:
        return -await super().reward(sample)


class Careless(Sound):
    @tool
    def count(self, name: str) -> int:
        """Count.

        Args:
            thing: what
        """
        return len(nothing)  # type: ignore[name-defined]  # noqa: F821


class LeavesTasks(Sound):
    async def reset(self, sample: Sample) -> list[Message]:
        self.task = asyncio.create_task(self.tick())
        return await super().reset(sample)

    async def tick(self) -> None:
        await anyio.sleep_forever()


class LeavesFiles(Sound):
    kept: ClassVar[list[Any]] = []

    async def reset(self, sample: Sample) -> list[Message]:
        self.kept.append(open("/dev/null"))  # noqa: SIM115, ASYNC230
        return await super().reset(sample)


class Moves(Sound):
    async def reset(self, sample: Sample) -> list[Message]:
        os.environ["CHECK_ROW"] = str(time.monotonic())
        return await super().reset(sample)


class Replays(Sound):
    when_interrupted = "replay"

    async def step(self, turn: Turn) -> Step:
        again = any(frame.f_code.co_name == "_replay" for frame, _ in traceback.walk_stack(None))
        return Step([{"role": "user", "content": f"{again}"}], done=turn.index > 1)


class BackwardsByKey(Sound):
    async def reward(self, sample: Sample) -> dict[str, float]:  # type: ignore[override]
        return {"score": -await super().reward(sample), "index": float(sample.index or 0)}
