"""A real MCP server for tests, by the official SDK: `python mcp_server.py` (stdio) or `... http PORT`."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def title(title: str) -> str:
    """Give it back, to see that an argument may have this name."""
    return title


@server.tool()
def fail() -> str:
    """Raise."""
    raise ToolError("no luck")


@server.tool()
def hang() -> str:
    """Never answer in time."""
    time.sleep(60)
    return "late"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def pid() -> int:
    """The server's process."""
    return os.getpid()


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")
