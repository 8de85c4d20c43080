"""Tools of an MCP server (Model Context Protocol), by the official SDK.

1. `MCPTools.stdio("uvx", "some-server")` starts a server and talks over its pipes; `MCPTools.http(url)` talks to a
   running one by streamable HTTP. Either is an entry of `Environment.tools`; the server is opened once a process.
2. Arguments are checked against the server's own schemas before a call leaves, with a message that the model can act on.
   Names, descriptions and schemas come from outside: their size is bounded, and `SchemaCheck` checks by them.
3. A call is made once: if the connection is lost the call fails, and the next call opens it anew.
4. A server that was started here ends with this process, however that ends."""

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import anyio

from agentrl import parent_watchdog
from agentrl.errors import PluginError, first_error, install, raised_as
from agentrl.tasks import undone_by
from agentrl.tools.arguments import OutcomeKind, ToolError, mistakes, of_schema
from agentrl.tools.base import DEFAULT_TIMEOUT, CallOptions, Tool, ToolSource, described
from agentrl.tools.schema_check import SchemaCheck

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult
    from mcp.types import Tool as ServerTool

Connect = Callable[[], AbstractAsyncContextManager["Client"]]
_CLOSE_SECONDS, _MAX_PAGES = 10.0, 100
_MAX_CHARS = 1 << 18
"""Characters that the names, descriptions and schemas of a server's tools may have: all of them go into every prompt."""


class MCPTools(ToolSource):
    """The tools of one MCP server; a `ToolSource`."""

    def __init__(
        self,
        connect: Connect,
        what: str,
        *,
        include: Collection[str] | None = None,
        prefix: str = "",
        start_timeout: float = 30.0,
        **options: Unpack[CallOptions],
    ) -> None:
        """Use `stdio` or `http`. `connect` opens an SDK client; `what` is the server in messages. `include`: names of the
        server's tools to take; all if None. `prefix`: put before each tool's name, to keep the tools of several servers
        apart. `start_timeout`: seconds that connecting may take. `options`: `timeout`, `max_output_chars`,
        `max_concurrency` (for each tool) and `on_failure`, as of `Tool`."""
        self._connect, self._what = connect, what
        self._include, self._prefix, self._start_timeout = include, prefix, start_timeout
        self._options, self._lock, self._check = options, anyio.Lock(), SchemaCheck()
        self._tools: tuple[Tool, ...] | None = None
        self._connection: _Connection | None = None

    @classmethod
    def stdio(
        cls,
        command: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **options: Any,
    ) -> Self:
        """A server to start: a program that speaks MCP over its standard input and output. `env`: environment variables,
        besides a minimal set. `cwd`: its working directory. `options`: as of `MCPTools`."""
        what = f"MCP server `{' '.join((command, *arguments))}`"

        def connect() -> "Client":
            from mcp import Client, StdioServerParameters

            if shutil.which(command) is None:
                raise PluginError(f"{what}: there is no program {command!r}; install it, or give its path")
            guarded = ["-I", "-S", str(Path(parent_watchdog.__file__)), str(os.getpid()), command, *arguments]
            return Client(StdioServerParameters(command=sys.executable, args=guarded, env=dict(env or {}), cwd=cwd))

        return cls(connect, what, **options)

    @classmethod
    def http(cls, url: str, *, headers: Mapping[str, str] | None = None, **options: Any) -> Self:
        """A running server's streamable HTTP endpoint (usually `http://host:port/mcp`). `headers`: sent with every
        request, for example an authorisation. `options`: as of `MCPTools`."""

        @asynccontextmanager
        async def connect() -> AsyncIterator["Client"]:
            import httpx2
            from mcp import Client
            from mcp.client.streamable_http import streamable_http_client

            seconds = options.get("timeout", DEFAULT_TIMEOUT)
            async with (
                httpx2.AsyncClient(headers=dict(headers or {}), timeout=httpx2.Timeout(seconds)) as http,
                Client(streamable_http_client(url, http_client=http)) as client,
            ):
                yield client

        return cls(connect, f"MCP server {url}", **options)

    @property
    def tools(self) -> Sequence[Tool]:
        """The server's tools. Raises PluginError: it is not open."""
        if self._tools is None:
            raise PluginError(f"{self._what} is not open; use `async with` or put it into `Environment.tools`")
        return self._tools

    async def open(self) -> None:
        """Connect and list the tools. Raises PluginError: the SDK is not installed, the server cannot be reached in
        time, its tools cannot be used, or `include` names one that it lacks."""
        listed = (await self._opened()).listed
        async with undone_by(self.close):
            self._tools = await self._taken(listed)

    async def _taken(self, listed: Sequence["ServerTool"]) -> tuple[Tool, ...]:
        taken = [entry for entry in listed if self._include is None or entry.name in self._include]
        if missing := sorted(set(self._include or ()) - {entry.name for entry in taken}):
            known = ", ".join(sorted(entry.name for entry in listed))
            raise PluginError(f"{self._what} has no tool {', '.join(missing)}; it has {known:.1000}")
        sizes = {entry.name: len(entry.model_dump_json()) for entry in taken}
        if (size := sum(sizes.values())) > _MAX_CHARS:
            largest = max(sizes, key=lambda name: sizes[name])
            said = f"{size:,} characters, {largest:.100} alone {sizes[largest]:,}; at most {_MAX_CHARS:,} may go into a prompt"
            what = f"{self._what}: the descriptions and schemas of its tools have"
            raise PluginError(f"{what} {said}. Choose tools with `include`")
        tools = tuple(map(self._tool, taken))
        for tool, entry in zip(tools, taken, strict=True):
            with raised_as(PluginError, f"tool {tool.name!r}: its parameters are no usable JSON schema", PluginError):
                await self._check.problems(json.dumps(entry.input_schema), {})  # without arguments: only the schema
        return tools

    async def close(self) -> None:
        connection, self._connection, self._tools = self._connection, None, None
        if connection is not None:
            await connection.close()
        await self._check.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _tool(self, entry: "ServerTool") -> Tool:
        name = re.sub(r"[^a-zA-Z0-9_-]", "_", self._prefix + entry.name)  # models' formats allow no other characters
        schema = json.dumps(entry.input_schema)

        async def call(**arguments: Any) -> str:
            raised = partial(ToolError, kind=OutcomeKind.RAISED)
            with raised_as(raised, f"the arguments cannot be checked by the schema of `{name}`", PluginError):
                problems = await self._check.problems(schema, arguments)
            if problems:
                raise mistakes(problems)
            return await self._call(entry.name, arguments)

        said, arguments = entry.description or entry.title or entry.name, _without_titles(entry.input_schema)
        return Tool(call, name=name, description=said, arguments=of_schema(name, arguments), **self._options)

    async def _opened(self) -> "_Connection":
        async with self._lock:
            if self._connection is None or self._connection.lost:
                if self._connection is not None:
                    await self._connection.close()
                self._connection = await _Connection.start(self._connect, self._what, self._start_timeout)
            return self._connection

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp.shared.exceptions import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST

        try:
            connection = await self._opened()
        except PluginError as error:
            # The error has the server's address, which may have a key.
            raise ToolError("the tool's server cannot be reached", kind=OutcomeKind.RAISED) from error
        try:
            result = await connection.client.call_tool(name, arguments)
        except MCPError as error:
            lapsed = error.code == INVALID_REQUEST and "session" in error.error.message.lower()  # a 404 over HTTP
            if error.code == CONNECTION_CLOSED or lapsed:
                raise connection.gone(error) from error
            raise ToolError(error.error.message) from error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError) as error:
            raise connection.gone(error) from error
        if result.is_error:
            raise ToolError(_text(result) or f"`{name}` failed")
        return _text(result)


class _Connection:
    """One open client. A task of its own enters and leaves it, as the SDK's cancel scopes demand."""

    def __init__(self, connect: Connect) -> None:
        self.client: Client
        self.listed: list[ServerTool] = []
        self.lost, self._stop = False, asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._own(connect))

    @classmethod
    async def start(cls, connect: Connect, what: str, timeout: float) -> "_Connection":
        connection = cls(connect)
        try:
            with anyio.fail_after(timeout):
                await asyncio.shield(connection._ready)
        except BaseException as error:
            connection._task.cancel()
            await connection.close()
            if isinstance(error, PluginError) or not isinstance(error, Exception):
                raise
            said = f"{what} cannot be opened: {described(first_error(error))}; does it run and speak MCP?"
            if isinstance(error, ModuleNotFoundError):
                said = f"{what}: the MCP SDK is not installed; {install('mcp')}"
            elif isinstance(error, TimeoutError):
                said = f"{what} did not answer within {timeout:g} s; is it an MCP server?"
            raise PluginError(said) from error
        return connection

    async def _own(self, connect: Connect) -> None:
        try:
            async with connect() as client:
                self.client, self.listed = client, await _list_tools(client)
                if not self._ready.done():
                    self._ready.set_result(None)
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - `start` raises it; later it is a lost connection
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            self.lost = True

    def gone(self, error: Exception) -> ToolError:
        """Mark the connection as lost; the error for the call that met it."""
        self.lost, said = True, f"the connection to the tool's server was lost ({described(first_error(error))})"
        return ToolError(said, kind=OutcomeKind.RAISED)

    async def close(self) -> None:
        self._stop.set()
        with anyio.CancelScope(shield=True):
            done, _ = await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)
            if not done:
                self._task.cancel()
                await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)


async def _list_tools(client: "Client") -> list["ServerTool"]:
    found, cursor = list["ServerTool"](), None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        if (cursor := page.next_cursor) is None:
            return found
    raise PluginError(f"the MCP server's list of tools has more than {_MAX_PAGES} pages")


def _without_titles(schema: Any) -> Any:
    """Titles repeat the names and only cost prompt tokens; a property that is itself called `title` stays."""
    if isinstance(schema, list):
        return [_without_titles(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(entry) for name, entry in value.items()}
        if key in ("properties", "$defs") and isinstance(value, dict)
        else _without_titles(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }


def _text(result: "CallToolResult") -> str:
    """Return the text for the model: the texts; other content by name; structured content as JSON if no text."""
    parts = []
    for block in result.content:
        if (text := getattr(block, "text", None)) is None and block.type == "resource":
            text = getattr(block.resource, "text", None)
        parts.append(text if text is not None else f"[{block.type}: {getattr(block, 'mime_type', None) or 'no text'}]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
