"""The calculator as agents on three packages: each plays through a gateway, with the demo's settings, and learns."""

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.config import RunSettings
from agentrl.demo.example import run_example
from agentrl.demo.run import DEMO
from agentrl.rollout.functions import GenerateFunction
from agentrl.sample import Sample
from examples.openai_agents import calculator_agents
from examples.openai_agents.run import EXAMPLE
from tests.gateway.acceptance_engine import hermes
from tests.gateway.live import live
from tests.support.nightly import weekly

AGENTS = {"openai_agents": "agents", "openai_sdk": "openai", "anthropic_sdk": "anthropic"}
"""The functions and the packages that they need."""


@pytest.fixture(autouse=True)
def _clients_of_this_event_loop() -> None:
    calculator_agents._openai.cache_clear()
    calculator_agents._anthropic.cache_clear()


def test_the_settings_are_those_of_the_demo_with_an_agent_in_place_of_its_environment() -> None:
    own, demo = RunSettings.from_file(EXAMPLE.config), RunSettings.from_file(DEMO.config)
    path = own.rollout.custom_generate_function_path
    assert path is not None
    assert GenerateFunction.load(path).agent
    rollout = own.rollout.model_copy(update={"custom_generate_function_path": None, "env": demo.rollout.env})
    assert own.model_copy(update={"rollout": rollout}) == demo


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_calls_the_tool_and_returns_the_reward(name: str) -> None:
    pytest.importorskip(AGENTS[name])

    def script(turn: int, prompt: str) -> str:
        said = [hermes(None, "", [("calculator", {"expression": "2*3"})]), "<answer>6</answer>"]
        return said[turn] if turn == 0 or "<tool_response>\n6\n</tool_response>" in prompt else "no result"

    sample = Sample(prompt=[{"role": "user", "content": "What is 2*3?"}], label="6")
    async with live(script) as served:
        for label, reward in (("6", 1.0), ("7", 0.0)):
            session = served.open()
            url = served.gateway.url(session)
            assert await getattr(calculator_agents, name)(url, replace(sample, label=label)) == reward
            nodes = session.tree.shown()["nodes"]
            assert [node["reason"] for node in nodes] == ["first", "extend"]
            served.gateway.close(session.token)


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_that_goes_on_calling_has_no_reward(name: str) -> None:
    pytest.importorskip(AGENTS[name])
    call = hermes(None, "", [("calculator", {"expression": "2*3"})])
    sample = Sample(prompt=[{"role": "user", "content": "What is 2*3?"}], label="6")
    async with live(lambda turn, prompt: call) as served:
        session = served.open()
        assert await getattr(calculator_agents, name)(served.gateway.url(session), sample) == 0.0
        assert session.counts["requests"] == calculator_agents.MAX_TURNS


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", weekly(AGENTS, ("openai_agents", "anthropic_sdk")))
def test_it_learns(name: str, tmp_path: Path) -> None:
    pytest.importorskip(AGENTS[name])
    flags = ["--custom-generate-function-path", f"examples.openai_agents.calculator_agents:{name}"]
    success = run_example(EXAMPLE, tmp_path / "run", flags=flags, say=print)
    assert success[0] <= 0.4
    assert success[-1] >= 0.8
