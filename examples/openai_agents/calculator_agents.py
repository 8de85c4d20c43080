"""The demo's calculator as three agents without any import of agentrl: they get an address and use its wire format.

1. `openai_agents` is an agent of the OpenAI Agents SDK, which runs its own loop. `openai_sdk` and `anthropic_sdk` are
   loops over a plain client.
2. Each returns the reward of its answer. The tool's schema is the demo's, which the shipped model was taught.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from agentrl.demo.task import calculator, score
from agentrl.sample import Sample
from agentrl.tools import Toolbox

if TYPE_CHECKING:
    import anthropic
    import openai

MAX_TURNS = 3
TOOLBOX = Toolbox([calculator])
TOOL: dict[str, Any] = calculator.schema["function"]


async def use_tool(name: str, arguments: Any) -> str:
    """Return what a call of the model shows: its result, or the text of an error."""
    return (await TOOLBOX.run(name, arguments)).text


def question(sample: Sample) -> str:
    """Return the problem, which is the only user message."""
    assert not isinstance(sample.prompt, str)
    return str(sample.prompt[0]["content"])


async def openai_agents(base_url: str, sample: Sample) -> float:
    """Play with the OpenAI Agents SDK."""
    from agents import Agent, FunctionTool, OpenAIChatCompletionsModel, RunConfig, Runner
    from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError

    async def called(_: Any, arguments: str) -> str:
        return await use_tool(TOOL["name"], arguments)

    tool = FunctionTool(TOOL["name"], TOOL["description"], TOOL["parameters"], called, strict_json_schema=False)
    model = OpenAIChatCompletionsModel("policy", _openai().with_options(base_url=f"{base_url}/v1"))
    agent = Agent(name="calculates", model=model, tools=[tool])
    try:
        result = await Runner.run(
            agent, question(sample), max_turns=MAX_TURNS, run_config=RunConfig(tracing_disabled=True)
        )
    except (MaxTurnsExceeded, ModelBehaviorError):  # the latter: it called an unknown tool
        return 0.0
    return score(str(result.final_output), str(sample.label))


async def openai_sdk(base_url: str, sample: Sample) -> float:
    """Play with OpenAI's client."""
    client = _openai().with_options(base_url=f"{base_url}/v1")
    messages: list[Any] = [{"role": "user", "content": question(sample)}]
    tools: Any = [{"type": "function", "function": TOOL}]
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        said = answer.choices[0].message
        if not said.tool_calls:
            return score(said.content or "", str(sample.label))
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            assert call.type == "function"
            shown = await use_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": shown})
    return 0.0


async def anthropic_sdk(base_url: str, sample: Sample) -> float:
    """Play with Anthropic's client."""
    client = _anthropic().with_options(base_url=base_url)
    messages: list[Any] = [{"role": "user", "content": question(sample)}]
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    tools: Any = [tool]
    for _ in range(MAX_TURNS):
        answer = await client.messages.create(model="policy", max_tokens=1000, messages=messages, tools=tools)
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return score("".join(block.text for block in answer.content if block.type == "text"), str(sample.label))
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": await use_tool(call.name, call.input)}
            for call in calls
        ]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    return 0.0


@cache
def _openai() -> "openai.AsyncOpenAI":
    """Return one client, with one pool of connections, for all trajectories. Each trajectory has its own address.

    A batch begins with hundreds of connections at once. By default each may take five seconds."""
    import openai

    return openai.AsyncOpenAI(api_key="any", base_url="http://127.0.0.1", timeout=600)


@cache
def _anthropic() -> "anthropic.AsyncAnthropic":
    import anthropic

    return anthropic.AsyncAnthropic(api_key="any", base_url="http://127.0.0.1", timeout=600)
