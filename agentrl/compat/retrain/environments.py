"""retrain's environments, run by our agent loop, and its FastMCP environment."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from agentrl.compat.retrain.formats import KEPT, action_of
from agentrl.compat.retrain.rewards import RewardCalculator, call
from agentrl.envs import Environment, Step, Turn
from agentrl.errors import PluginError, raised_as
from agentrl.plugins import load_object
from agentrl.rollout.failures import bad_result
from agentrl.sample import Message, Sample
from agentrl.tools.mcp import MCPTools


class _Kept(Environment):
    """Base class that stores each turn's data for reward functions on the sample."""

    @classmethod
    async def setup(cls, args: Any) -> None:
        """Find the reward functions of `reward_setup`, so that an unknown name fails before the run starts."""
        RewardCalculator(**getattr(args, "reward_setup", {}))

    def begin(self, sample: Sample) -> None:
        sample.metadata[KEPT] = {"infos": [], "actions": [], "evaluation": self.evaluating}

    def note(self, turn: Turn, info: Mapping[str, Any]) -> None:
        kept = turn.sample.metadata[KEPT]
        action = {name: value for name, value in action_of(turn).items() if name != "old_per_token_logps"}
        kept["actions"].append(action)
        kept["infos"].append(json.loads(json.dumps(dict(info), default=repr)))


class EnvironmentBridge(_Kept):
    """Adapter of a class with retrain's (and Gymnasium's) form. Each trajectory has a separate instance.

        class Guess:
            async def reset(self, *, seed=None, options=None): ...            # -> (observation, info)
            async def step(self, action): ...    # -> (observation, reward, terminated, truncated, info)

    Plain methods run in a thread. `setup` and `close` are called if they exist. `action` is an `LLMAction`. An
    observation is text, chat messages, or retrain's mapping. Of a mapping, the model is shown the new messages of
    `current_conversation`, or else `content`, and is offered `available_tools`. `options` has the row's
    `initial_prompt`, and `evaluation`. All samples of a group have the same `seed`.

    `environment` is the class, or its path `pkg.mod:Name` or `path/file.py:Name`. `config` has its keyword arguments
    (`env_specific_config`), of which `max_steps` also limits the turns."""

    max_turns: ClassVar[int] = 20

    def __init__(self, environment: Any, config: dict[str, Any] | None = None) -> None:
        kind = load_object(environment, what="environment.type") if isinstance(environment, str) else environment
        self._name, self._inner, self._seen = getattr(kind, "__name__", str(kind)), kind(**config or {}), 0
        if lacks := [name for name in ("reset", "step") if not hasattr(self._inner, name)]:
            raise PluginError(f"environment.type {self._name} has no method {lacks[0]}; see docs/retrain.md")

    async def reset(self, sample: Sample) -> list[Message]:
        self.begin(sample)
        await self._optional("setup")
        options = {"evaluation": self.evaluating, **({"initial_prompt": sample.prompt} if sample.prompt else {})}
        answer = await call(self._inner.reset, {"seed": sample.group_index, "options": options})
        observation, _ = self._taken("reset", answer, "observation, info")
        if isinstance(observation, Mapping) and (tools := observation.get("available_tools")):
            named = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
            sample.metadata.setdefault("tools", named)
        return self._shown(observation) or await super().reset(sample)

    async def step(self, turn: Turn) -> Step:
        form = "observation, reward, terminated, truncated, info"
        answer = await call(partial(self._inner.step, action_of(turn)), {})
        observation, reward, terminated, truncated, info = self._taken("step", answer, form)
        ends = {"terminated": bool(terminated), "truncated": bool(truncated)}
        self.note(turn, {**info, **ends})
        numbers = {k: v for k, v in info.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        return Step(self._shown(observation), float(reward), any(ends.values()), numbers)

    async def close(self) -> None:
        await self._optional("close")

    async def _optional(self, method: str) -> None:
        if (function := getattr(self._inner, method, None)) is not None:
            await call(function, {})

    def _taken(self, method: str, answer: Any, form: str) -> tuple[Any, ...]:
        if not isinstance(answer, tuple) or len(answer) != form.count(",") + 1 or not isinstance(answer[-1], Mapping):
            raise bad_result(f"{self._name}.{method} must return ({form}), got {answer!r:.200}")
        return answer

    def _shown(self, observation: Any) -> list[Message]:
        """Return the part of an observation that the model has not seen. The model's own turns are left out."""
        if isinstance(observation, Mapping):
            whole = observation.get("current_conversation") or []
            new, self._seen = [m for m in whole[self._seen :] if m["role"] != "assistant"], len(whole)
            if new or observation.get("content") is None:
                return new
            observation = observation["content"]
        return list(observation) if isinstance(observation, list) else [{"role": "user", "content": str(observation)}]


class FastMCPEnv(_Kept):
    """retrain's `fastmcp_env`: the tools of an MCP server at `server_url` (streamable HTTP, `http://host:port/mcp`). A
    turn without calls is the final answer. `initial_prompt_template` is the prompt of samples without a prompt.

    As in retrain, a successful call earns 0.1, a call of an unknown tool -0.2, a failed call -0.5, and the answer 1."""

    max_turns: ClassVar[int] = 10

    def __init__(self, server_url: str, initial_prompt_template: str = "Welcome! What would you like to do?") -> None:
        self._prompt = initial_prompt_template

    @classmethod
    async def setup(cls, args: Any) -> None:
        await super().setup(args)
        source = MCPTools.http(args.env_args["server_url"])
        with raised_as(PluginError, "environment.env_specific_config.server_url", PluginError):
            await source.open()
        cls.tools = (source,)

    @classmethod
    async def teardown(cls) -> None:
        sources, cls.tools = cls.tool_sources(), ()
        for source in sources:
            await source.close()

    async def reset(self, sample: Sample) -> list[Message]:
        self.begin(sample)
        return await super().reset(sample) if sample.prompt else [{"role": "user", "content": self._prompt}]

    async def step(self, turn: Turn) -> Step:
        if not (turn.tool_calls or turn.broken):
            self.note(turn, {"final_answer_detected": turn.content, "terminated": True})
            return Step(reward=1.0, done=True)
        step = await self.run_tools(turn)
        self.note(turn, {**step.info, "terminated": False})
        worked, unknown, broken = (step.info.get(f"tool_{kind}", 0) for kind in ("ok", "unknown_tool", "broken"))
        failed = step.info["tool_calls"] - worked - unknown - broken
        return Step(step.messages, 0.1 * worked - 0.2 * unknown - 0.5 * failed, False, step.info)
