"""Tasksets of verifiers 0.4: `--env verifiers:ID`. The library plays each episode with its own tasks, tools, state, harnesses
and rewards. Each request of the harness goes through the gateway, so a trajectory has the ids that the model sampled."""

import asyncio
import itertools
import math
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import httpx
import httpx2
import verifiers.v1 as vf
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from openai import AsyncOpenAI
from pydantic import ValidationError
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

from agentrl.adapters import task_number
from agentrl.envs import AgentEnvironment, Environment
from agentrl.errors import EnvFailure, GraderFailure, PluginError
from agentrl.sample import Sample
from agentrl.tools.threads import run_in_daemon_thread

__all__ = ["ChatHarness"]  # The library finds a harness by this list.
CHAT = "agentrl-chat"  # id of the harness


class Tasks:
    """The selected tasks of a taskset by number. An endless taskset is loaded up to the largest requested number."""

    def __init__(self, selected: Any) -> None:
        self._unread, self._read, self._endless = iter(selected), list[Any](), not selected.bounded
        self._one_call = threading.Lock()

    async def at(self, number: int) -> Any:
        """Return a task; the numbers begin again after the last task. Raises PluginError: the taskset has no tasks."""
        return await run_in_daemon_thread(partial(self._at, number))

    def _at(self, number: int) -> Any:
        with self._one_call:
            missing = max(0, number + 1 - len(self._read)) if self._endless else None
            self._read += itertools.islice(self._unread, missing)
        if not self._read:
            raise PluginError("the taskset has no tasks, or --env-args select=... selects none")
        return self._read[number % len(self._read)]


class VerifiersEnvironment(AgentEnvironment):
    """One episode of a taskset. `env`, `tasks` and `role` are known after `setup`, `trace` after `act`."""

    taskset: ClassVar[str]  # the taskset's id
    env: ClassVar[Any]  # the library's environment
    tasks: ClassVar[Tasks]  # the tasks to play
    role: ClassVar[str]  # name of the agent that the model plays
    trace: Any = None  # the library's record of the episode
    _serving: ClassVar[AsyncExitStack]
    _web: ClassVar[httpx.AsyncClient]
    _playing: asyncio.Task[Any] | None = None
    _key = ""

    def __init__(self, select: dict[str, Any] | None = None, **config: Any) -> None:
        """Accept the arguments that `setup` reads. `select`: tasks to play, as the library's `SelectConfig`. `config`:
        fields of the library's `EnvConfig`, for example `taskset` and `agent`."""

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
        cls._web = await cls._serving.enter_async_context(_connections())

    @classmethod
    async def teardown(cls) -> None:
        await cls._serving.aclose()

    async def act(self, base_url: str, sample: Sample) -> None:
        """Play the task with the number `metadata["task"]`, or else the group's number. Raises EnvFailure: the episode
        failed, or the model played more than once in it."""
        task = await self.tasks.at(task_number(sample, least=-math.inf) or 0)
        config = vf.EvalClientConfig(base_url=f"{base_url}/v1")
        self._key = config.model_dump_json()
        self.env._interception.clients[self._key] = GatewayClient(config.base_url, self._web)
        # `close` cancels this asyncio task once, so that the library can free its runtime. A scope of anyio would cancel
        # each await of the library's clean-up.
        self._playing = asyncio.create_task(self.env.run_episode(task, vf.ModelContext(model="policy", client=config)))
        self.trace = _played(await asyncio.shield(self._playing), self.role)
        rewards = {name: each.value for name, each in self.trace.rewards.items() if each}
        found = {"rewards": rewards, "metrics": dict(self.trace.metrics), "stop": self.trace.stop_condition}
        sample.metadata["verifiers"] = {"task": task.data.idx, **found}

    async def reward(self, sample: Sample) -> float:
        """Return the sum of the library's weighted rewards. Raises GraderFailure: the library computed none."""
        if missing := [name for name, each in self.trace.rewards.items() if each is None]:
            raise GraderFailure(f"the library gave no reward {', '.join(missing)} ({self.trace.stop_condition})")
        return float(self.trace.reward)

    async def close(self) -> None:
        """End an episode that was cancelled, so that the library frees its runtime and its servers."""
        if self._playing is not None and not self._playing.done():
            self._playing.cancel()
            await asyncio.wait([self._playing])
        self.env._interception.clients.pop(self._key, None)


def environment(name: str) -> type[Environment]:
    """Return the class for the id of an installed taskset. Raises PluginError: no such taskset is installed."""
    try:
        vf.taskset_config_type(name)
    except ModuleNotFoundError as error:
        raise PluginError(f"{error} ({error.__cause__})") from error
    return type("VerifiersEnvironment", (VerifiersEnvironment,), {"__module__": __name__, "taskset": name})


def _read_config(name: str, given: dict[str, Any], max_turns: int | None) -> tuple[Any, str]:
    """Return the library's settings of an environment, and the name of the agent that the model plays. Raises PluginError:
    the settings are not supported. Raises ValidationError: the settings are invalid."""
    taskset, what = {**given.get("taskset", {}), "id": name}, f"verifiers:{name}: --env-args"
    config = vf.resolve_env_config({"interception": {"type": "server"}, **given, "taskset": taskset})
    agents = {field: value for field, value in config if isinstance(value, vf.AgentConfig)}
    if config.interception.type != "server" or any(c.retries != vf.RetryConfig() for c in (config, *agents.values())):
        raise PluginError(f"{what}: leave out interception and retries; use --failure-policy env=retry")
    if len(roles := [role for role, agent in agents.items() if agent.client is None]) != 1:
        other = """user='{"model": "NAME", "client": {"type": "eval", "base_url": "http://..."}}'"""
        raise PluginError(f"{what}: the model plays one of {', '.join(agents)}; give all others a client: {other}")
    bundled = vf.default_harness_id(name) != vf.default_harness_id("")
    complete = {role: _with_defaults(agent, bundled, max_turns) for role, agent in agents.items()}
    config = config.model_copy(update=complete)
    for role, harness in config.agent_harnesses().items():
        if vf.load_harness(harness).EXECUTES_CODE and "runtime" not in agents[role].model_fields_set:
            place = f"""{role}='{{"runtime": {{"type": "docker"}}}}', or "subprocess" for your own rights"""
            raise PluginError(f"{what}: the harness {harness.id} runs commands of the model; choose a runtime: {place}")
    return config, roles[0]


def _with_defaults(agent: Any, bundled: bool, max_turns: int | None) -> Any:
    """Return an agent's settings with a local runtime in place of the library's cloud, and, if the taskset has no harness,
    with a chat loop in place of `bash`. `max_turns`: the limit of the agent that the model plays."""
    runtime = agent.runtime if "runtime" in agent.model_fields_set else vf.SubprocessConfig()
    chat = vf.HarnessConfig(id=CHAT if isinstance(runtime, vf.SubprocessConfig) else "null")
    harness = agent.harness or (None if bundled else chat)
    turns = agent.max_turns or (max_turns if agent.client is None else None)
    return agent.model_copy(update={"runtime": runtime, "harness": harness, "max_turns": turns})


def _played(episode: Any, role: str) -> Any:
    """Return the trace of the model's agent. Raises EnvFailure: the episode failed, or has none or several such traces."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise EnvFailure("; ".join(f"{each.type}: {each.message:.500}" for each in errors), kind="verifiers_failed")
    if len(traces := [trace for trace in episode.traces if trace.agent.name == role]) != 1:
        raise EnvFailure(f"{role} played {len(traces)} times in an episode; expected once", kind="verifiers_plays")
    return traces[0]


class GatewayClient(EvalClient):
    """The library's client for one address of the gateway. All episodes share connections."""

    def __init__(self, base_url: str, web: httpx.AsyncClient) -> None:
        self.base_url, self.api_key, self.headers, self.client = base_url, "any", dict[str, str](), web


class ChatHarness(NullHarness):
    """The library's harness `null`, whose program runs in this process. A separate process takes seconds to start."""

    async def setup(self, runtime: Any) -> None:
        """Prepare nothing."""

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **gate: Any
    ) -> Any:
        """Play until an answer calls no tool. Raises RuntimeError: the library's server cannot be reached."""
        system, prompt = self.resolve_prompt(data)
        told = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages = [message_to_wire(each) for each in [*([vf.SystemMessage(content=system)] if system else []), *told]]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        off = dict.fromkeys(("bash", "edit", "search"), False)
        options = SimpleNamespace(**off, api_key=secret, tool_interception_url=gate.get("tool_interception_url"))
        async with AsyncExitStack() as stack, _connections() as web:
            client, program = AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=web), _program()
            schemas, places, connected = await program.connect_mcp({"mcpServers": servers}, stack)
            compactor = program.Compactor(client, ctx.model, schemas, False, None)
            try:
                await program.run_chat_loop(options, compactor, messages, places, connected, web)
            except SystemExit as error:
                raise RuntimeError(f"the harness null ended with {error.code}: it lost the library's server") from error
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


@cache
def _program() -> Any:
    """Load the program of `null`, which the library has as source text. Its tool clients load the certificates once."""
    program = ModuleType("verifiers_null")
    exec(CHAT_PROGRAM_SOURCE, vars(program))
    soon = httpx2.Limits(keepalive_expiry=2.0)  # A server closes an idle connection after 5 s, maybe during a request.
    connection = partial(httpx2.AsyncClient, limits=soon, verify=httpx2.create_ssl_context(), follow_redirects=True)

    @asynccontextmanager
    async def mcp_client(server: dict[str, Any]) -> AsyncIterator[Client]:
        async with (
            connection(timeout=server["timeout"]) as web,
            Client(streamable_http_client(server["url"], http_client=web)) as client,
        ):
            yield client

    vars(program)["mcp_client"] = mcp_client
    return program


def _connections() -> Any:
    """Return a client for servers on this computer. It loads no certificates: loading takes longer than an episode."""
    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None), verify=False, trust_env=False)


sys.modules[CHAT.replace("-", "_")] = sys.modules[__name__]  # The library imports a harness by its id, without dots.
