"""`Toolbox`: the tools of one environment, called by name."""

import difflib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from agentrl.errors import PluginError
from agentrl.tools.arguments import as_object
from agentrl.tools.base import Tool, as_tool
from agentrl.tools.outcome import OutcomeKind, ToolError, ToolOutcome


class Toolbox:
    """Tools by name, in the order in which the model sees them.

    Raises:
        PluginError: an entry cannot be a tool, or two tools share a name.
    """

    def __init__(self, tools: Iterable[Callable[..., Any] | Tool] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        for entry in tools:
            added = as_tool(entry)
            if added.name in self._tools:
                raise PluginError(f"two tools are called {added.name!r}; give one another name: @tool(name=...)")
            self._tools[added.name] = added

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools' schemas in OpenAI form, for a chat template."""
        return [entry.schema for entry in self]

    async def run(self, name: str, arguments: Mapping[str, Any] | str, *, state: object = None) -> ToolOutcome:
        """Run one call of the model; never raises for what the model did.

        Args:
            name: the tool that the model asked for.
            arguments: its arguments, parsed or as JSON text.
            state: handed to parameters annotated `Annotated[..., Injected]`.

        Raises:
            ToolFailure: the tool failed, and its `on_failure` is "fail".
        """
        start = time.perf_counter()
        try:
            entry = self._find(name)
            parsed = as_object(arguments)
        except ToolError as error:
            return ToolOutcome(f"Error: {error}", error.kind, time.perf_counter() - start)
        return await entry.run(parsed, state=state)

    def _find(self, name: str) -> Tool:
        if name in self._tools:
            return self._tools[name]
        close = difflib.get_close_matches(str(name), self._tools, n=1)
        names = ", ".join(f"`{known}`" for known in self._tools) or "none"
        hint = f"did you mean `{close[0]}`? " if close else ""
        raise ToolError(f"unknown tool `{name}`; {hint}the tools are {names}", kind=OutcomeKind.UNKNOWN_TOOL)
