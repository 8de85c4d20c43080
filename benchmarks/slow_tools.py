"""A load with heavy tails: an environment whose tool takes a Pareto-distributed time, and the random draws of the load.

1. Every draw is a function of only the sample's number and its turn. So the run and the simulation of its bound
   (`benchmarks.async_bound`) play exactly the same trajectories.
2. `TURNS` turns a trajectory. The model's part of each is a tool call of `CALL_TOKENS` to `CALL_TOKENS + MAX_FILLER`
   tokens, written by `benchmarks.delay_engine`; the tool's part is a sleep.
3. All seconds are multiplied by the `scale` in `load.json` of the run's folder. When the run ends, its environment
   writes `trajectories.json` there: for each trajectory its begin and end by `time.monotonic`, its sample, and if it
   finished.
"""

import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import anyio

from agentrl import Environment, Sample, tool
from agentrl.envs import Step, Turn
from agentrl.sample import Message

TURNS = 6
SHORTEST, LONGEST, SHAPE = 0.05, 6.0, 1.1
"""Seconds of a tool call before scaling: Pareto of this shape, from the shortest on, truncated at the longest."""
TOKEN_SECONDS = 0.003
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "capital of France"}}\n</tool_call><|im_end|>'
CALL_TOKENS, MAX_FILLER = 22, 12
MEDIAN = 0.92
"""The median of the seconds that a trajectory spends in tools, before scaling."""

LOAD, RECORD = "load.json", "trajectories.json"


def tool_seconds(index: int, turn: int) -> float:
    """Return the seconds, before scaling, of the tool call in turn 1, 2, ... of sample `index`."""
    return min(LONGEST, SHORTEST * random.Random(f"tool/{index}/{turn}").paretovariate(SHAPE))


def turn_tokens(index: int, turn: int) -> int:
    """Return how many tokens the model writes in that turn."""
    return CALL_TOKENS + random.Random(f"tokens/{index}/{turn}").randint(0, MAX_FILLER)


def earned(index: int) -> float:
    """Return the reward. Slow trajectories succeed more often, so that a bias of the run to fast ones shows."""
    slow = sum(tool_seconds(index, turn) for turn in range(1, TURNS + 1)) > MEDIAN
    return float(random.Random(f"reward/{index}").random() < (0.7 if slow else 0.3))


DRAWS: Mapping[str, Callable[[int], float]] = {
    "length": lambda index: sum(turn_tokens(index, turn) for turn in range(1, TURNS + 1)),
    "tool time": lambda index: sum(tool_seconds(index, turn) for turn in range(1, TURNS + 1)),
    "reward": earned,
}
"""Properties of a sample that are known before it is played."""


class SlowTools(Environment):
    """Plays the load that the module describes."""

    max_turns = TURNS
    _folder: ClassVar[Path]
    _scale: ClassVar[float]
    _played: ClassVar[list[tuple[float, float, int, bool]]] = []
    _finished = False

    @classmethod
    async def setup(cls, args: Any) -> None:
        cls._folder = Path(args.output_dir)
        cls._scale = json.loads((cls._folder / LOAD).read_text())["scale"]

    @classmethod
    async def teardown(cls) -> None:
        (cls._folder / RECORD).write_text(json.dumps(cls._played))

    async def reset(self, sample: Sample) -> list[Message]:
        self._began = time.monotonic()
        self._index = sample.index or 0
        return await super().reset(sample)

    @tool(timeout=2 * LONGEST)
    async def search(self, query: str) -> str:
        """Search for something."""
        await anyio.sleep(self._scale * tool_seconds(self._index, self._turn))
        return "found"

    async def step(self, turn: Turn) -> Step:
        self._turn = turn.index
        return replace(await super().step(turn), done=turn.index == TURNS)

    async def reward(self, sample: Sample) -> float:
        self._finished = True
        return earned(self._index)

    async def close(self) -> None:
        self._played.append((self._began, time.monotonic(), self._index, self._finished))
