"""`fastmcp_env` with a real MCP server on loopback."""

import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.chat import Chat
from agentrl.compat.retrain import FastMCPEnv
from agentrl.envs import ALONE, Environments, EnvSpec
from agentrl.errors import PluginError
from agentrl.rollout.agent_loop import run_environment
from agentrl.rollout.environment import set_up
from agentrl.sample import Sample
from tests.rollout.scripted import END, ScriptedEngine, make_context
from tests.tools.test_mcp import http_server


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' + END


@contextlib.asynccontextmanager
async def entry(**config: Any) -> AsyncIterator[EnvSpec]:
    made = EnvSpec(FastMCPEnv, SimpleNamespace(env_args=config, rm_type=None), config)
    async with set_up([made], timeout=20):
        yield made


async def play(chat: Chat, entry: EnvSpec, replies: list[str], prompt: str = "") -> Sample:
    context = make_context(chat, ScriptedEngine(chat, replies))
    object.__setattr__(context, "environments", Environments({ALONE: entry}))
    (sample,) = await run_environment(context, Sample(prompt=prompt, index=0), context.params())
    return sample.validate()


async def test_an_episode_with_a_server_on_loopback(chat: Chat) -> None:
    with http_server() as url:
        async with entry(server_url=url, initial_prompt_template="How much is 1 plus 2?") as mcp:
            sample = await play(chat, mcp, [call("add", '{"a": 1, "b": 2}'), "3" + END])
            said = [message["content"] for message in sample.metadata["messages"]]
            assert (said[0], said[2], said[3]) == ("How much is 1 plus 2?", "3", "3")
            assert sample.metadata["step_rewards"] == [0.1, 1.0]
            assert sample.metadata["retrain"]["infos"][1] == {"final_answer_detected": "3", "terminated": True}
            asked = await play(chat, mcp, ["2" + END], prompt="And 1 plus 1?")
            assert asked.metadata["messages"][0]["content"] == "And 1 plus 1?"


async def test_tools_come_from_the_server(chat: Chat) -> None:
    with http_server() as url:
        async with entry(server_url=url) as mcp:
            assert {schema["function"]["name"] for schema in mcp.make().toolbox.schemas} >= {"add", "title", "fail"}
            wrong = [call("ad", "{}"), call("add", '{"a": "x"}'), call("fail", "{}"), "<tool_call>{</tool_call>" + END]
            sample = await play(chat, mcp, [*wrong, "Sorry." + END])
            assert sample.metadata["step_rewards"] == [-0.2, -0.5, -0.5, 0.0, 1.0]
            assert "did you mean `add`?" in sample.metadata["messages"][2]["content"]
    assert FastMCPEnv.tools == ()


async def test_no_server_is_said_with_its_url() -> None:
    with pytest.raises(PluginError, match=r"env_specific_config.server_url: MCP server http://127.0.0.1:9/mcp"):
        async with entry(server_url="http://127.0.0.1:9/mcp"):
            pass
