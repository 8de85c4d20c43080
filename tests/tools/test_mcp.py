"""Tools of real MCP servers: the reference time server, and one that can fail, over pipes and over HTTP."""

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from agentrl import Environment, Sample
from agentrl.chat.messages import ToolCall
from agentrl.envs import Turn, check_environment
from agentrl.errors import PluginError
from agentrl.run.training import free_port
from agentrl.tools import OutcomeKind, Toolbox, ToolError, ToolSource
from agentrl.tools.mcp import MCPTools
from tests.support.nightly import nightly
from tests.support.warm import python

SERVER = str(Path(__file__).parents[1] / "support" / "mcp_server.py")
COMMAND = (python(), "-c", f"import runpy; runpy.run_path({SERVER!r}, run_name='__main__')")


def over_pipes(**options: Any) -> MCPTools:
    return MCPTools.stdio(*COMMAND, **options)


@contextlib.contextmanager
def http_server() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([*COMMAND, "http", str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "Uvicorn running" in line:
                break
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def both(kind: str, **options: Any) -> AsyncIterator[Toolbox]:
    with contextlib.ExitStack() as stack:
        source = (
            over_pipes(**options) if kind == "stdio" else MCPTools.http(stack.enter_context(http_server()), **options)
        )
        assert isinstance(source, ToolSource)
        async with source:
            yield Toolbox(source.tools)


@pytest.mark.parametrize("kind", nightly(["stdio", "http"], 1))
async def test_calls_and_failures(kind: str) -> None:
    async with both(kind, timeout=5) as tools:
        schema = next(entry["function"] for entry in tools.schemas if entry["function"]["name"] == "add")
        assert schema["description"] == "Add two numbers."
        assert schema["parameters"]["properties"] == {"a": {"type": "integer"}, "b": {"type": "integer"}}
        assert (await tools.run("add", {"a": 2, "b": 40})).text == "42"
        assert (await tools.run("title", {"title": "<tool_call>"})).text == "<tool_call>"
        wrong = await tools.run("add", '{"a": "two"}')
        assert wrong.kind is OutcomeKind.BAD_ARGUMENTS
        assert wrong.text == "Error: 'b' is a required property; argument `a`: 'two' is not of type 'integer'"
        failed = await tools.run("fail", {})
        assert (failed.kind, "no luck" in failed.text) == (OutcomeKind.REFUSED, True)


async def test_calls_run_side_by_side() -> None:
    async with both("stdio") as tools:
        answers: dict[int, str] = {}

        async def one(number: int) -> None:
            answers[number] = (await tools.run("add", {"a": number, "b": 1})).text

        async with anyio.create_task_group() as group:
            for number in range(50):
                group.start_soon(one, number)
    assert answers == {number: str(number + 1) for number in range(50)}


async def test_a_call_that_hangs_holds_up_no_other_one() -> None:
    async with both("stdio") as tools, anyio.create_task_group() as group:
        group.start_soon(tools.run, "hang", {})
        await anyio.wait_all_tasks_blocked()
        assert (await tools.run("add", {"a": 1, "b": 2})).text == "3"
        group.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_hanging_call_meets_its_deadline() -> None:
    async with both("stdio", timeout=0.5) as tools:
        late = await tools.run("hang", {})
        assert late.kind is OutcomeKind.TIMEOUT


async def test_a_server_that_died_is_started_again_for_the_next_call() -> None:
    async with both("stdio") as tools:
        first = (await tools.run("pid", {})).text
        lost = await tools.run("die", {})
        assert lost.kind is OutcomeKind.RAISED
        assert "connection to the tool's server was lost" in lost.text
        second = await tools.run("pid", {})
        assert second.kind is OutcomeKind.OK
        assert second.text != first


async def test_a_session_that_the_server_has_forgotten_is_opened_again_for_the_next_call() -> None:
    """With the protocol before 2026, servers forget sessions that were long idle, or that a client ended, as here."""
    sessions: dict[str, None] = {}

    async def note(request: httpx2.Request) -> None:
        if "mcp-session-id" in request.headers:
            sessions[request.headers["mcp-session-id"]] = None

    @contextlib.asynccontextmanager
    async def connect() -> AsyncIterator[Client]:
        async with (
            httpx2.AsyncClient(event_hooks={"request": [note]}) as http,
            Client(streamable_http_client(url, http_client=http), mode="legacy") as client,
        ):
            yield client

    with http_server() as url:
        async with MCPTools(connect, "MCP server") as source:
            tools = Toolbox(source.tools)
            assert (await tools.run("add", {"a": 1, "b": 2})).text == "3"
            (session,) = sessions
            async with httpx2.AsyncClient() as other:
                assert (await other.delete(url, headers={"mcp-session-id": session})).status_code == 200
            lost = await tools.run("add", {"a": 1, "b": 2})
            assert lost.kind is OutcomeKind.RAISED
            assert "connection to the tool's server was lost" in lost.text
            assert (await tools.run("add", {"a": 1, "b": 2})).text == "3"
            assert len(sessions) == 2


async def test_the_server_ends_when_the_source_is_closed() -> None:
    async with both("stdio") as tools:
        watched = os.pidfd_open(int((await tools.run("pid", {})).text))
    assert select.select([watched], [], [], 60)[0]


@pytest.mark.slow
def test_the_server_ends_when_this_process_is_killed(tmp_path: Path) -> None:
    script = f"""
import anyio
from agentrl.tools.mcp import MCPTools
async def main():
    async with MCPTools.stdio({sys.executable!r}, {SERVER!r}) as source:
        print(await next(t for t in source.tools if t.name == "pid").call({{}}), flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    watched = os.pidfd_open(pid)
    process.kill()
    process.wait()
    assert select.select([watched], [], [], 20)[0], "the server outlived the process that started it"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (MCPTools.stdio("no-such-program"), "there is no program 'no-such-program'"),
        (MCPTools.stdio(sys.executable, "-c", "print('hello')", start_timeout=10), "does it run and speak MCP"),
        (
            MCPTools.stdio(sys.executable, "-c", "import time; time.sleep(60)", start_timeout=1),
            "did not answer within 1 s",
        ),
        (MCPTools.http("http://127.0.0.1:9/mcp", start_timeout=10), "cannot be opened"),
        (over_pipes(include=["add", "sub"]), "has no tool sub; it has add, die"),
    ],
)
async def test_what_cannot_be_opened(source: MCPTools, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        await source.open()
    with pytest.raises(PluginError, match="is not open"):
        source.tools  # noqa: B018


class MathEnv(Environment):
    tools = (over_pipes(include=["add"], prefix="math."),)


@pytest.mark.slow
async def test_an_environment_names_a_server_among_its_tools() -> None:
    check_environment(MathEnv)
    (source,) = MathEnv.tool_sources()
    await source.open()
    try:
        env = MathEnv.create()
        call = ToolCall("1", "math_add", {"a": 1, "b": 2})
        step = await env.step(Turn(1, "", "", tool_calls=[call], sample=Sample()))
        assert [message["content"] for message in step.messages] == ["3"]
    finally:
        await source.close()


@pytest.mark.slow
async def test_the_reference_time_server() -> None:
    async with MCPTools.stdio(sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC") as source:
        tools = Toolbox(source.tools)
        arguments = {"source_timezone": "Asia/Tokyo", "time": "16:30", "target_timezone": "Asia/Kolkata"}
        outcome = await tools.run("convert_time", arguments)
        assert "-3.5h" in outcome.text


async def test_the_model_does_not_read_the_address_of_a_server_that_is_gone() -> None:
    source = MCPTools.http("http://127.0.0.1:9/mcp?apiKey=SECRET", start_timeout=10)
    with pytest.raises(ToolError, match="^the tool's server cannot be reached$"):
        await source._call("add", {})


async def test_the_http_client_is_closed_with_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every lost connection is opened again. If clients stayed open, the process would run out of files."""
    made: list[httpx2.AsyncClient] = []

    class Noted(httpx2.AsyncClient):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(httpx2, "AsyncClient", Noted)
    source = MCPTools.http("http://127.0.0.1:9/mcp", start_timeout=10)
    for _ in range(2):
        with pytest.raises(PluginError, match="cannot be opened"):
            await source.open()
    assert [client.is_closed for client in made] == [True, True]
