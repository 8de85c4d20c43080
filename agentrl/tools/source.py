"""`ToolSource`: tools that come from somewhere else and must be opened first, such as an MCP server."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from agentrl.tools.base import Tool


class ToolSource(ABC):
    """An entry of `Environment.tools` that brings tools once it is open; opened once a process, before `setup`."""

    @property
    @abstractmethod
    def tools(self) -> Sequence[Tool]:
        """The tools.

        Raises:
            PluginError: it is not open.
        """

    @abstractmethod
    async def open(self) -> None:
        """Connect.

        Raises:
            PluginError: with what is wrong and what to do.
        """

    @abstractmethod
    async def close(self) -> None:
        """Disconnect; what it started ends. Does nothing if it is not open."""
