"""Tools: Python functions that a model may call.

1. `@tool` makes a `Tool` of a function: name and description from the docstring, schema from type hints.
2. `Toolbox` runs the model's calls. A failure becomes a `ToolOutcome` with a sentence for the model, never a traceback;
   `on_failure="fail"` ends the trajectory with a `ToolFailure` if the fault is the tool's own.
3. A `ToolSource` provides tools from elsewhere: `agentrl.tools.mcp.MCPTools` provides an MCP server's tools."""

from agentrl.tools.arguments import Injected, OutcomeKind, ToolError, ToolOutcome
from agentrl.tools.base import OnFailure, Tool, Toolbox, ToolSource, as_tool, tool

__all__ = ["Injected", "OnFailure", "OutcomeKind", "ToolError", "ToolOutcome"]
__all__ += ["Tool", "ToolSource", "Toolbox", "as_tool", "tool"]
