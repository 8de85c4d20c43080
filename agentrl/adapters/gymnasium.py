"""Gymnasium environments as text: `--env gymnasium:ID`, for example `gymnasium:FrozenLake-v1`. The model reads each
observation as text. The action is read from its answer: a whole number (Discrete) or the text itself (Text)."""

import inspect
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from agentrl.adapters import first_messages, task_number
from agentrl.envs import Environment, Step, Turn
from agentrl.errors import PluginError
from agentrl.plugins import load_object
from agentrl.sample import Message, Sample
from agentrl.tools.threads import run_in_daemon_thread

MAX_NUMBERS = 256  # maximum number of values in a Box that is shown as text
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?!\w|\.\d)")
_RULES_END = re.compile(r"\n\s*##+ *(?:Information|Arguments|References|Version)")


class GymnasiumEnvironment(Environment):
    """One episode of Gymnasium's `env_id`; `max_turns` is its step limit. Its calls run in threads, one at a time."""

    env_id: ClassVar[str]

    def __init__(self, instructions: str = "", **arguments: Any) -> None:
        """Keep what `reset` needs. `instructions`: the rules, for the first message; default: the environment's docstring.
        A row's prompt replaces the rules. `arguments`: of `gymnasium.make`, such as `is_slippery=false`. With
        `render_mode=ansi` the model reads the rendered text below each observation."""
        self.instructions, self.arguments = instructions, arguments
        self.game: gymnasium.Env[Any, Any] | None = None
        self._one_call = threading.Lock()

    @classmethod
    async def setup(cls, args: Any) -> None:
        """Make an environment once; a step limit of its arguments is the limit of turns. Raises PluginError: it cannot be
        shown as text."""
        given = args.env_args if args is not None else {}
        first = cls(**given)
        try:
            made = await first._call(first._make)
            if "max_episode_steps" in given:
                cls.max_turns = (made.spec and made.spec.max_episode_steps) or cls.max_turns
        finally:
            await first.close()

    async def reset(self, sample: Sample) -> list[Message]:
        """Start the episode of the group. The seed is `metadata["task"]`, or else the group's number."""
        self.game = await self._call(self._make)
        observation, _ = await self._call(partial(self.game.reset, seed=task_number(sample)))
        rules = self.instructions or _RULES_END.split(inspect.getdoc(self.game.unwrapped) or "")[0].strip()
        return first_messages(sample, rules, _how_to_answer(self.game.action_space), await self._shown(observation))

    async def step(self, turn: Turn) -> Step:
        """Take the action that the answer names. An answer without a valid action has reward 0, and nothing happens."""
        assert self.game is not None
        if (action := _action(self.game.action_space, turn.content)) is None:
            content = f"There is no valid action in the answer. {_how_to_answer(self.game.action_space)}"
            return Step([{"role": "user", "content": content}], reward=0.0, info={"invalid_actions": 1})
        observation, reward, terminated, truncated, _ = await self._call(partial(self.game.step, action))
        step = Step([{"role": "user", "content": await self._shown(observation)}], reward=float(reward))
        return step.finish(stop_reason="" if terminated else "time_limit") if terminated or truncated else step

    async def close(self) -> None:
        if self.game is not None:
            await self._call(self.game.close)

    async def _call(self, function: Callable[[], Any]) -> Any:
        def alone() -> Any:
            with self._one_call:  # `close` too waits while the step of a cancelled trajectory still runs
                return function()

        return await run_in_daemon_thread(alone)

    def _make(self) -> gymnasium.Env[Any, Any]:
        self.game = gymnasium.make(self.env_id, **self.arguments)
        if reason := _not_text(self.game.observation_space):
            raise PluginError(f"gymnasium:{self.env_id}: its observations cannot be shown as text: {reason}")
        if not isinstance(found := self.game.action_space, (spaces.Discrete, spaces.Text)):
            raise PluginError(f"gymnasium:{self.env_id}: its action space is {found}; expected Discrete or Text")
        return self.game

    async def _shown(self, observation: Any) -> str:
        assert self.game is not None
        shown = _text(self.game.observation_space, observation)
        return f"{shown}\n{await self._call(self.game.render)}" if self.game.render_mode == "ansi" else shown


def environment(name: str) -> type[Environment]:
    """Return the class for an id of Gymnasium's registry, or for `MODULE:ID` of a module or file that registers it.
    Raises `gymnasium.error.Error`: the id is unknown."""
    module, _, env_id = name.rpartition(":")
    if module:
        load_object(f"{module}:__name__", what="--env")
    limit = gymnasium.spec(env_id).max_episode_steps or Environment.max_turns
    return type("GymnasiumEnvironment", (GymnasiumEnvironment,), {"env_id": env_id, "max_turns": limit})


def _how_to_answer(space: gymnasium.Space[Any]) -> str:
    if isinstance(space, spaces.Discrete):
        return f"Answer with one whole number from {space.start} to {space.start + space.n - 1}."
    assert isinstance(space, spaces.Text)
    of = f"of the characters {''.join(sorted(space.character_set))!r}"
    return f"Answer with a text of {space.min_length} to {space.max_length} {of} and nothing else."


def _action(space: gymnasium.Space[Any], answer: str) -> int | str | None:
    """Return the last whole number of the answer, or its text; None if the space does not contain it."""
    action: int | str | None = answer.strip()
    if isinstance(space, spaces.Discrete):
        action = int(found[-1]) if (found := _NUMBER.findall(answer)) and len(found[-1]) < 20 else None
    return action if action is not None and space.contains(action) else None


def _not_text(space: gymnasium.Space[Any]) -> str:
    if isinstance(space, spaces.Dict):
        return next(filter(None, map(_not_text, space.spaces.values())), "")
    if isinstance(space, spaces.Tuple):
        return next(filter(None, map(_not_text, space.spaces)), "")
    small = isinstance(space, (spaces.Box, spaces.MultiDiscrete)) and np.prod(space.shape or (1,)) <= MAX_NUMBERS
    return "" if small or isinstance(space, (spaces.Text, spaces.Discrete)) else f"{space} has no text form"


def _text(space: gymnasium.Space[Any], value: Any) -> str:
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{name}: {_text(inner, value[name])}" for name, inner in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return ", ".join(_text(inner, part) for inner, part in zip(space.spaces, value, strict=True))
    return str(value) if isinstance(space, (spaces.Text, spaces.Discrete)) else np.array2string(value, separator=", ")
