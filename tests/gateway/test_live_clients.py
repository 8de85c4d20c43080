"""Unmodified clients against a gateway over HTTP: each trained id was sampled at that place.

`scripts/live_agents.sh` installs the clients; a test without its client is skipped.
"""

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.acceptance_engine import hermes
from tests.gateway.live import Played, calls_then, live

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
FUNCTION = {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FUNCTION}


def shell(command: str) -> str:
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30, check=True).stdout


async def played(client: Callable[[str], object], **script: Any) -> Played:
    """Run a client, which blocks, in a thread."""
    async with live(script.get("script") or calls_then("bash")) as served:
        session = served.open()
        await asyncio.to_thread(client, served.gateway.url(session))
        return served.close(session)


def shape(played: Played) -> tuple[int, int, dict[str, int]]:
    return played.turns, played.roots, dict(played.reasons)


APPEND_ONLY = (4, 1, {"first": 1, "extend": 3})


# ---- OpenAI's SDK ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_chat(stream: bool) -> None:
    openai = pytest.importorskip("openai")

    def play(base: str) -> None:
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(8):
            if stream:
                asked = {"stream_options": {"include_usage": True}}
                with client.chat.completions.stream(model="m", messages=messages, tools=[TOOL], **asked) as events:
                    answer = events.get_final_completion()
            else:
                answer = client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
            assert answer.usage.completion_tokens > 0
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls or ():
                shown = shell(json.loads(call.function.arguments)["command"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": shown})
            if not said.tool_calls:
                assert said.content == "done"
                return

    assert shape(await played(play)) == APPEND_ONLY


@pytest.mark.parametrize("how", ["items", "previous", "stream"])
async def test_openai_responses(how: str) -> None:
    openai = pytest.importorskip("openai")

    def play(base: str) -> None:
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0)
        items: list[Any] = [{"role": "user", "content": "go"}]
        previous: dict[str, Any] = {}
        for _ in range(8):
            asked = {"model": "m", "input": items, "tools": [{"type": "function", **FUNCTION}], **previous}
            if how == "stream":
                with client.responses.stream(**asked) as events:
                    for _ in events:
                        pass
                    answer = events.get_final_response()
            else:
                answer = client.responses.create(**asked)
            calls = [item for item in answer.output if item.type == "function_call"]
            shown = [shell(json.loads(call.arguments)["command"]) for call in calls]
            results = [
                {"type": "function_call_output", "call_id": call.call_id, "output": text}
                for call, text in zip(calls, shown, strict=True)
            ]
            if how == "previous":
                items, previous = results, {"previous_response_id": answer.id}
            else:
                items = [*items, *(item.model_dump(exclude_none=True) for item in answer.output), *results]
            if not calls:
                assert answer.output_text == "done"
                return

    assert shape(await played(play)) == APPEND_ONLY


# ---- Anthropic's SDK ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_messages(stream: bool) -> None:
    anthropic = pytest.importorskip("anthropic")
    tool = {"name": "bash", "description": "Run a command.", "input_schema": PARAMETERS}

    def play(base: str) -> None:
        client = anthropic.Anthropic(base_url=base, api_key="any", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(8):
            known = {"model": "m", "messages": messages, "tools": [tool], "system": "You act."}
            counted = client.messages.count_tokens(**known).input_tokens
            if stream:
                with client.messages.stream(**known, max_tokens=500) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(**known, max_tokens=500)
            assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted
            calls = [block for block in answer.content if block.type == "tool_use"]
            messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
            if not calls:
                assert answer.content[-1].text == "done"
                return
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": shell(call.input["command"])}
                for call in calls
            ]
            messages.append({"role": "user", "content": results})

    assert shape(await played(play)) == APPEND_ONLY


# ---- frameworks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
async def test_openai_agents(wire: str) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)

    async def run(base: str) -> None:
        client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0)
        model = getattr(agents, wire)(model="m", openai_client=client)

        @agents.function_tool  # type: ignore[untyped-decorator]
        def bash(command: str) -> str:
            """Run a command."""
            return shell(command)

        helper = agents.Agent(name="helper", instructions="Help.", model=model, tools=[bash])
        agent = agents.Agent(name="main", instructions="Act.", model=model, tools=[bash], handoffs=[helper])
        result = await agents.Runner.run(agent, "go", max_turns=9)
        more = [*result.to_input_list(), {"role": "user", "content": "again"}]
        streamed = agents.Runner.run_streamed(agent, more, max_turns=9)
        async for _ in streamed.stream_events():
            pass
        assert (result.final_output, streamed.final_output) == ("done", "done")

    found = await played(lambda base: asyncio.run(run(base)))
    assert shape(found) == (5, 1, {"first": 1, "extend": 4})


@pytest.mark.parametrize("wire", ["chat", "responses", "messages"])
async def test_pydantic_ai(wire: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")

    def play(base: str) -> None:
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.anthropic import AnthropicProvider
        from pydantic_ai.providers.openai import OpenAIProvider

        if wire == "messages":
            model: Any = AnthropicModel("m", provider=AnthropicProvider(base_url=base, api_key="any"))
        else:
            kind = OpenAIChatModel if wire == "chat" else OpenAIResponsesModel
            model = kind("m", provider=OpenAIProvider(base_url=f"{base}/v1", api_key="any"))
        agent = pydantic_ai.Agent(model, instructions="Act.")

        @agent.tool_plain  # type: ignore[untyped-decorator]
        def bash(command: str) -> str:
            """Run a command."""
            return shell(command)

        assert agent.run_sync("go").output == "done"

    assert shape(await played(play)) == APPEND_ONLY


@pytest.mark.parametrize("wire", ["chat", "responses", "messages"])
async def test_langgraph(wire: str) -> None:
    pytest.importorskip("langgraph")
    agents = pytest.importorskip("langchain.agents")

    def play(base: str) -> None:
        from langchain_anthropic import ChatAnthropic
        from langchain_openai import ChatOpenAI

        if wire == "messages":
            model: Any = ChatAnthropic(model="m", base_url=base, api_key="any")
        else:
            model = ChatOpenAI(model="m", base_url=f"{base}/v1", api_key="any", use_responses_api=wire == "responses")

        def bash(command: str) -> str:
            """Run a command."""
            return shell(command)

        agent = agents.create_agent(model, [bash], system_prompt="Act.")
        assert agent.invoke({"messages": [("user", "go")]})["messages"][-1].text == "done"

    assert shape(await played(play)) == APPEND_ONLY


async def test_smolagents_tell_their_calls_as_texts_so_that_each_turn_is_a_branch() -> None:
    smolagents = pytest.importorskip("smolagents")
    last = hermes(None, "", [("final_answer", {"answer": "done"})])

    def play(base: str) -> None:
        reached = {"api_base": f"{base}/v1", "api_key": "any"}
        model = smolagents.OpenAIServerModel(model_id="m", tool_choice="auto", **reached)  # otherwise it forces calls

        @smolagents.tool  # type: ignore[untyped-decorator]
        def bash(command: str) -> str:
            """Run a command.

            Args:
                command: What to run.
            """
            return shell(command)

        agent = smolagents.ToolCallingAgent(tools=[bash], model=model, max_steps=5)
        assert agent.run("go") == "done"

    found = await played(play, script=calls_then("bash", last))
    assert (found.turns, len(found.samples)) == (4, 4)
    assert found.counts["trained"] == found.counts["sampled"]


async def test_mini_swe_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CONFIGURED", "true"), ("COST_TRACKING", "ignore_errors"), ("SILENT_STARTUP", "1")):
        monkeypatch.setenv(f"MSWEA_{name}", value)
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    minisweagent = pytest.importorskip("minisweagent")
    end = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

    def play(base: str) -> None:
        import yaml
        from minisweagent.agents.default import DefaultAgent
        from minisweagent.environments.local import LocalEnvironment
        from minisweagent.models.litellm_model import LitellmModel

        shipped = yaml.safe_load((Path(minisweagent.__file__).parent / "config" / "mini.yaml").read_text())
        own = {name: value for name, value in shipped["model"].items() if name not in ("model_name", "model_kwargs")}
        reached = {"api_base": f"{base}/v1", "api_key": "any"}
        model = LitellmModel(**{"cost_tracking": "ignore_errors", **own}, model_name="openai/m", model_kwargs=reached)
        texts = {name: shipped["agent"][name] for name in ("system_template", "instance_template")}
        DefaultAgent(model, LocalEnvironment(cwd=str(tmp_path)), **texts, step_limit=6, cost_limit=0).run("go")

    script = calls_then("bash", hermes(None, "", [("bash", {"command": end})]))
    assert shape(await played(play, script=script)) == APPEND_ONLY
