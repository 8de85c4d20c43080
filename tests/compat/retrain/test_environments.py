"""Classes of retrain's form, played by the agent loop with a scripted engine."""

from dataclasses import replace
from typing import Any

import pytest

from agentrl.chat import Chat
from agentrl.compat.retrain import EnvironmentBridge, RewardBridge, RolloutBridge
from agentrl.compat.retrain.formats import KEPT
from agentrl.envs import ALONE, Environments, EnvSpec
from agentrl.errors import EnvFailure, GraderFailure
from agentrl.rollout.agent_loop import run_environment
from agentrl.rollout.helpers import Recorder, recording
from agentrl.sample import Sample, Status
from tests.rollout.scripted import END, ScriptedEngine, make_context


class Guess:
    """Like retrain's own: plain or async methods, a mapping as observation, its own episode state."""

    made: list["Guess"] = []

    def __init__(self, low: int = 0, max_steps: int = 9) -> None:
        self.said: list[dict[str, Any]] = []
        self.conversation = [{"role": "user", "content": f"Guess, from {low}."}]
        self.closed = self.ready = False
        Guess.made.append(self)

    async def setup(self) -> None:
        self.ready = True

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        assert self.ready
        self.seed, self.options = seed, options
        tools = [{"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}]
        shown = {"content": None, "current_conversation": list(self.conversation), "available_tools": tools}
        return shown, {}

    def step(self, action: dict[str, Any]) -> Any:
        self.said.append(action)
        self.conversation.append({"role": "assistant", "content": action["raw_llm_output"]})
        right = action["raw_llm_output"].startswith("7")
        if not right:
            self.conversation.append({"role": "user", "content": "No."})
        observation = {"content": None, "current_conversation": list(self.conversation)}
        return observation, 1.0 if right else -0.25, right, len(self.said) > 4, {"tries": 1, "odd": {1, 2}}

    def close(self) -> None:
        self.closed = True


class Short:
    """The smallest form: text in, text out."""

    def reset(self) -> Any:
        return "Begin.", {}

    async def step(self, text: Any) -> Any:
        return "More.", 0.5, False, text["raw_llm_output"].startswith("Stop"), {}


async def play(
    chat: Chat, kind: Any, replies: list[str], config: Any = None, evaluating: bool = False, **settings: Any
) -> Sample:
    context = make_context(chat, ScriptedEngine(chat, [text + END for text in replies]), **settings)
    bridged = EnvSpec(EnvironmentBridge, context.args, {"environment": kind, "config": config})
    context = replace(context, environments=Environments({ALONE: bridged}), evaluating=evaluating)
    sample = Sample(index=5, group_index=2)
    (played,) = await run_environment(context, sample, context.params())
    return played.validate()


async def test_a_class_with_reset_and_step_is_played(chat: Chat) -> None:
    Guess.made.clear()
    sample = await play(chat, Guess, ["3", "5", "7"], {"low": 1})
    assert [m["content"] for m in sample.metadata["messages"]] == ["Guess, from 1.", "3", "No.", "5", "No.", "7"]
    assert (sample.status, sample.reward) == (Status.COMPLETED, 0.5)
    assert sample.metadata["step_rewards"] == [-0.25, -0.25, 1.0]
    assert sample.metadata["counters"]["tries"] == 3
    assert "Add." in chat.decode(sample.tokens[: sample.prompt_length])
    (played,) = Guess.made
    assert played.closed
    assert (played.seed, played.options) == (2, {"evaluation": False})
    assert [action["text"] for action in played.said] == ["3", "5", "7"]
    assert played.said[0]["old_per_token_logps"] == [-0.25] * len(chat.encode("3" + END))
    assert sample.metadata[KEPT]["infos"][2] == {"tries": 1, "odd": "{1, 2}", "terminated": True, "truncated": False}


async def test_text_is_an_observation_too(chat: Chat) -> None:
    sample = await play(chat, Short, ["Go", "Stop"])
    assert [m["content"] for m in sample.metadata["messages"]] == ["Begin.", "Go", "More.", "Stop", "More."]
    assert sample.reward == 1.0


async def test_calls_in_our_form_and_in_retrains_are_actions(chat: Chat) -> None:
    ours = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    theirs = '<tool>{"name": "add", "args": {"a": 1}}</tool>'
    await play(chat, Guess, [ours, theirs, "<tool>[1]</tool>", "<tool>{</tool>", "7"])
    *calls, listed, broken, last = Guess.made[-1].said
    assert [call["tool_call"] for call in calls] == [{"tool_name": "add", "tool_input": {"a": 1}}] * 2
    assert [call["action_type"] for call in calls] == ["tool_call"] * 2
    assert [call["action_type"] for call in (listed, broken, last)] == ["text_response"] * 3


async def test_each_trajectory_has_an_instance_of_its_own(chat: Chat) -> None:
    Guess.made.clear()
    first, second = [await play(chat, Guess, replies) for replies in (["3", "7"], ["7"])]
    assert (first.reward, second.reward) == (0.75, 1.0)
    assert len(Guess.made) == 2
    assert [len(made.said) for made in Guess.made] == [2, 1]


async def test_training_and_evaluation_differ(chat: Chat) -> None:
    Guess.made.clear()
    trained, evaluated = [await play(chat, Guess, ["7"], evaluating=how) for how in (False, True)]
    assert [made.options for made in Guess.made] == [{"evaluation": False}, {"evaluation": True}]
    assert (trained.metadata[KEPT]["evaluation"], evaluated.metadata[KEPT]["evaluation"]) == (False, True)


class Broken(Guess):
    def step(self, action: dict[str, Any]) -> Any:
        raise KeyError("nothing here")


class Four(Guess):
    def step(self, action: dict[str, Any]) -> Any:
        return super().step(action)[:4]


async def test_an_error_of_the_environment_is_typed(chat: Chat) -> None:
    with pytest.raises(EnvFailure, match=r"KeyError: 'nothing here' at .*test_environments.py:\d+ in step"):
        await play(chat, Broken, ["3"])
    with pytest.raises(EnvFailure, match=r"Four.step must return \(observation, reward, terminated, truncated, info\)"):
        await play(chat, Four, ["3"])
    with pytest.raises(EnvFailure, match="str has no method reset"):
        await play(chat, str, ["3"])
    with pytest.raises(EnvFailure, match="unexpected keyword argument 'high'"):
        await play(chat, Guess, ["3"], {"high": 1})


async def test_the_rollout_bridge_is_a_generate_function(chat: Chat) -> None:
    context = make_context(chat, ScriptedEngine(chat, ["3" + END, "7" + END]))
    generate = RolloutBridge(Guess, RewardBridge({"task_completion": {"weight": 2.0}})).generate
    async with recording(Recorder(context, context.params(), Sample())):
        (sample,) = await generate(context.args, Sample(index=0), {"max_new_tokens": 9}, evaluation=True)
    assert sample.reward == -0.25 + 1.0 + 2.0
    assert Guess.made[-1].options == {"evaluation": True}
    bad = RolloutBridge(Guess, RewardBridge({}, {"task_completion": {}})).generate
    async with recording(Recorder(context, context.params(), Sample())):
        with pytest.raises(GraderFailure, match="reward task_completion raised TypeError"):
            await bad(context.args, Sample(index=1), {})
