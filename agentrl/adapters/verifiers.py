"""Tasksets of verifiers 0.4: `--env verifiers:ID`. The library plays each episode with its own tasks, tools, state, harnesses
and rewards. Each request of the harness goes through the gateway, so a trajectory has the ids that the model sampled."""

import asyncio
import itertools
import json
import ssl
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import cache, partial
from typing import Any, ClassVar

import httpx
import httpx2
import verifiers.v1 as vf
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from pydantic import ValidationError
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS, bound_tool_message
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content

from agentrl.adapters import task_number
from agentrl.envs import AgentEnvironment, Environment
from agentrl.errors import EnvFailure, GraderFailure, PluginError
from agentrl.sample import Message, Sample
from agentrl.tools.threads import run_in_daemon_thread

__all__ = ["ChatHarness"]  # The library finds a harness by this list.
CHAT = "agentrl-chat"
"""The id of `ChatHarness`."""

Tools = dict[str, Callable[[dict[str, Any]], Awaitable[Any]]]


class Tasks:
    """The selected tasks of a taskset by number. They are loaded as far as somebody asked for them."""

    def __init__(self, selected: Any) -> None:
        self._unread, self._read, self._endless = iter(selected), list[Any](), not selected.bounded
        self._one_call = threading.Lock()

    async def at(self, number: int) -> Any:
        """Return a task; the numbers begin again after the last task. Raises PluginError: there is no task."""
        return await run_in_daemon_thread(partial(self._at, number))

    def _at(self, number: int) -> Any:
        with self._one_call:
            self._read += itertools.islice(self._unread, max(0, number + 1 - len(self._read)) if self._endless else None)
        if not self._read:
            raise PluginError("the taskset has no tasks, or --env-args select=... selects none")
        return self._read[number % len(self._read)]


class VerifiersEnvironment(AgentEnvironment):
    """One episode of a taskset.

    Attributes:
        taskset: the taskset's id.
        env: the library's environment; known after `setup`, as `tasks` and `role`.
        tasks: the tasks to play.
        role: the name of the agent that the model plays.
        trace: the library's record of the episode; known after `act`.
    """

    taskset: ClassVar[str]
    env: ClassVar[Any]
    tasks: ClassVar[Tasks]
    role: ClassVar[str]
    trace: Any = None
    _serving: ClassVar[AsyncExitStack]
    _web: ClassVar[httpx.AsyncClient]
    _playing: asyncio.Task[Any] | None = None
    _key = ""

    def __init__(self, select: dict[str, Any] | None = None, **config: Any) -> None:
        """Accept the arguments that `setup` reads.

        Args:
            select: the library's `SelectConfig`: which tasks to play.
            config: fields of the library's `EnvConfig`, for example `taskset` and `agent`.
        """

    @classmethod
    async def setup(cls, args: Any) -> None:
        """Load the environment and start the tool servers that all episodes share. Raises PluginError: the settings are
        wrong or not supported, or there are no tasks."""
        given = dict(args.env_args) if args is not None else {}
        try:
            select = vf.SelectConfig(**(given.pop("select", None) or {}))
            config, cls.role = _read_config(cls.taskset, given, args and args.max_turns)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise PluginError(f"verifiers:{cls.taskset}: --env-args: {'; '.join(problems)}") from error
        cls.env = vf.load_environment(config)
        cls.tasks = Tasks(cls.env.taskset.select(select))
        await cls.tasks.at(0)
        cls._serving = AsyncExitStack()
        await cls._serving.enter_async_context(cls.env.serving())
        limits = httpx.Limits(max_connections=None)
        web = httpx.AsyncClient(timeout=None, limits=limits, verify=False, trust_env=False)
        cls._web = await cls._serving.enter_async_context(web)

    @classmethod
    async def teardown(cls) -> None:
        """Stop the shared tool servers."""
        await cls._serving.aclose()

    async def act(self, base_url: str, sample: Sample) -> None:
        """Play the task with the number `metadata["task"]`, or else the group's number. Raises EnvFailure: the episode
        failed, or the model played more than once in it."""
        task = await self.tasks.at(task_number(sample) or 0)
        config = vf.EvalClientConfig(base_url=f"{base_url}/v1")
        self._key = config.model_dump_json()
        self.env._interception.clients[self._key] = GatewayClient(config.base_url, self._web)
        # A task of its own is cancelled once, in `close`, and can free its runtime then. A scope of anyio would cancel
        # each await of the library's clean-up.
        self._playing = asyncio.create_task(self.env.run_episode(task, vf.ModelContext(model="policy", client=config)))
        self.trace = _played(await asyncio.shield(self._playing), self.role)
        rewards = {name: each.value for name, each in self.trace.rewards.items() if each}
        found = {"rewards": rewards, "metrics": dict(self.trace.metrics), "stop": self.trace.stop_condition}
        sample.metadata["verifiers"] = {"task": task.data.idx, **found}

    async def reward(self, sample: Sample) -> float:
        """Return the sum of the library's weighted rewards. Raises GraderFailure: the library did not compute one of them."""
        if missing := [name for name, each in self.trace.rewards.items() if each is None]:
            raise GraderFailure(f"there is no reward {', '.join(missing)}; the library stopped at {self.trace.stop_condition}")
        return float(self.trace.reward)

    async def close(self) -> None:
        """End an episode that was cancelled, such that the library frees its runtime and its servers."""
        if self._playing is not None and not self._playing.done():
            self._playing.cancel()
            await asyncio.wait([self._playing])
        self.env._interception.clients.pop(self._key, None)


def environment(name: str) -> type[Environment]:
    """Return the class for the id of an installed taskset. Raises PluginError: there is none."""
    try:
        vf.taskset_config_type(name)
    except ModuleNotFoundError as error:
        raise PluginError(f"{error} ({error.__cause__})") from error
    return type("VerifiersEnvironment", (VerifiersEnvironment,), {"__module__": __name__, "taskset": name})


def _read_config(name: str, given: dict[str, Any], max_turns: int | None) -> tuple[Any, str]:
    """Return the library's settings of an environment, and the name of the agent that the model plays. Raises PluginError:
    they are not supported. Raises ValidationError: they are wrong."""
    one_server = {"interception": {"type": "server"}}
    config = vf.resolve_env_config({**one_server, **given, "taskset": {**given.get("taskset", {}), "id": name}})
    if config.interception.type != "server":
        raise PluginError(f"verifiers:{name}: the type of interception must be server")
    agents = {field: value for field, value in config if isinstance(value, vf.AgentConfig)}
    roles = [role for role, agent in agents.items() if agent.client is None]
    if len(roles) != 1:
        raise PluginError(
            f"verifiers:{name}: the model plays one agent, and {len(roles)} of {', '.join(agents)} have no client; name "
            """each other agent's model: --env-args user='{"model": "NAME", "client": {"base_url": "http://..."}}'"""
        )
    if any(each.retries != vf.RetryConfig() for each in (config, *agents.values())):
        raise PluginError(f"verifiers:{name}: leave out retries; --failure-policy env=retry repeats a trajectory")
    bundled = vf.default_harness_id(name) != vf.default_harness_id("")
    complete = {role: _complete(role, agent, bundled) for role, agent in agents.items()}
    own = complete[roles[0]]
    complete[roles[0]] = own.model_copy(update={"max_turns": own.max_turns or max_turns})
    config = config.model_copy(update=complete)
    for role, harness in config.agent_harnesses().items():
        if vf.load_harness(harness).EXECUTES_CODE and "runtime" not in agents[role].model_fields_set:
            raise PluginError(
                f"verifiers:{name}: the harness {harness.id} runs commands of the model; choose the place: "
                f"""--env-args {role}='{{"runtime": {{"type": "docker"}}}}', or "subprocess" for your own rights"""
            )
    return config, roles[0]


def _complete(role: str, agent: Any, bundled: bool) -> Any:
    """Return an agent's settings with our defaults: the subprocess runtime in place of the library's cloud, and, if the
    taskset has no harness, the chat loop in place of `bash`."""
    runtime = agent.runtime if "runtime" in agent.model_fields_set else vf.SubprocessConfig()
    inside = isinstance(runtime, vf.SubprocessConfig)
    chat = None if bundled else vf.HarnessConfig(id=CHAT if inside else "null")
    return agent.model_copy(update={"runtime": runtime, "harness": agent.harness or chat})


def _played(episode: Any, role: str) -> Any:
    """Return the trace of the model's agent. Raises EnvFailure: the episode failed, or has not one such trace."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        said = f"{errors[0].type}: {errors[0].message:.500}" if errors else "no error is recorded"
        raise EnvFailure(f"the episode failed: {said}", kind="verifiers_failed")
    traces = [trace for trace in episode.traces if trace.agent.name == role]
    if len(traces) != 1:
        raise EnvFailure(f"{role} played {len(traces)} times; expected one play an episode", kind="verifiers_plays")
    return traces[0]


class GatewayClient(EvalClient):
    """The library's client for one address of the gateway. All episodes share their connections, because the library's own
    client loads the certificates of servers, which takes longer than the rest of an episode."""

    def __init__(self, base_url: str, web: httpx.AsyncClient) -> None:
        self.base_url, self.api_key, self.headers, self.client = base_url, "any", {}, web


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """The chat loop of the library's harness `null`, without its process: MCP tools are called until an answer calls none."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """Play until an answer calls no tool, or the context is full. Raises HTTPStatusError: a request was refused."""
        system, prompt = self.resolve_prompt(data)
        told = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages = [message_to_wire(each) for each in ([vf.SystemMessage(content=system)] if system else []) + told]
        key = {"Authorization": f"Bearer {secret}"}
        async with (
            AsyncExitStack() as stack,
            httpx.AsyncClient(headers=key, timeout=None, verify=False, trust_env=False) as client,
        ):
            schemas, tools = await _connect(mcp_urls, self.config.tool_timeout, stack)
            body = {"model": ctx.model, **({"tools": schemas} if schemas else {})}
            while True:
                answer = await client.post(f"{endpoint}/chat/completions", json={**body, "messages": messages})
                if answer.status_code == 400 and any(each in answer.text.casefold() for each in CONTEXT_OVERFLOW_MARKERS):
                    break
                said = answer.raise_for_status().json()["choices"][0]["message"]
                messages.append({name: value for name, value in said.items() if value is not None})
                for call in said.get("tool_calls") or ():
                    verdict = await _verdict(client, tool_interception_url, call) if tool_interception_url else None
                    messages.append(bound_tool_message(verdict or await _result(call, tools)))
                if not said.get("tool_calls"):
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _connect(urls: dict[str, str], timeout: float, stack: AsyncExitStack) -> tuple[list[Any], Tools]:
    """Connect to MCP servers for as long as `stack` is open. Returns the schemas of their tools, and their functions."""
    schemas, tools = list[Any](), Tools()
    web = httpx2.AsyncClient(timeout=timeout, verify=_certificates(), follow_redirects=True)
    await stack.enter_async_context(web)
    for server, url in urls.items():
        client = await stack.enter_async_context(Client(streamable_http_client(url, http_client=web)))
        for tool in (await client.list_tools()).tools:
            name = f"{server}_{tool.name}" if server else tool.name
            if name in tools:
                raise PluginError(f"two tools have the name {name}; give one of their servers another TOOL_PREFIX")
            function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
            schemas.append({"type": "function", "function": function})
            tools[name] = partial(client.call_tool, tool.name)
    return schemas, tools


@cache
def _certificates() -> ssl.SSLContext:
    """Load the certificates of servers once."""
    return httpx2.create_ssl_context()


async def _verdict(client: httpx.AsyncClient, url: str, call: Message) -> Message | None:
    """Ask the task's hooks about a call. Returns the result that takes the call's place, or None if the tool may run.
    Raises RuntimeError: a hook stopped the episode."""
    function = call["function"]
    asked = {"tool_call_id": call["id"], "name": function["name"], "arguments": _arguments(function) or function["arguments"]}
    decision = (await client.post(url, json=asked)).raise_for_status().json()
    if decision["action"] == "stop":
        raise RuntimeError(decision["reason"])
    denied: Message | None = decision["message"] if decision["action"] == "deny" else None
    return denied


async def _result(call: Message, tools: Tools) -> Message:
    """Return the tool message for a call. A call that cannot be made has an error as its result."""
    function, name = call["function"], call["function"]["name"]
    if name not in tools:
        content: Any = f"error: there is no tool {name!r}"
    elif (arguments := _arguments(function)) is None:
        content = f"error: the arguments of {name} are no JSON object; send the call again"
    else:
        content = mcp_content_to_chat_content((await tools[name](arguments)).content)
    return {"role": "tool", "tool_call_id": call["id"], "content": content, "name": name}


def _arguments(function: dict[str, Any]) -> dict[str, Any] | None:
    try:
        found = json.loads(function["arguments"] or "{}")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


sys.modules[CHAT.replace("-", "_")] = sys.modules[__name__]  # The library imports a harness by its id, without dots.
