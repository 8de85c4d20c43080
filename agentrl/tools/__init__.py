"""Tools: Python functions that a model may call.

1. `@tool` turns a function (sync or async) into a `Tool`. Name and description come from its docstring, the JSON
   schema from its type hints; a parameter without a type hint is an error that names tool and parameter.
2. `Toolbox` holds the tools of one environment and runs the model's calls. Whatever goes wrong in a call (unknown
   tool, bad arguments, exception, deadline, unusable result) becomes a `ToolOutcome` with a sentence that the model
   can act on, never a traceback. A tool made with `on_failure="fail"` ends the trajectory with a `ToolFailure` where
   the fault is its own.
3. `ToolSource`s bring tools from elsewhere: `agentrl.tools.mcp.MCPTools` those of an MCP server.
4. This room imports neither torch nor ray, and knows nothing about tokens or templates.
"""

from agentrl.tools.arguments import Injected
from agentrl.tools.base import OnFailure, Tool, ToolSource, as_tool, tool
from agentrl.tools.outcome import OutcomeKind, ToolError, ToolOutcome
from agentrl.tools.toolbox import Toolbox

__all__ = [
    "Injected",
    "OnFailure",
    "OutcomeKind",
    "Tool",
    "ToolError",
    "ToolOutcome",
    "ToolSource",
    "Toolbox",
    "as_tool",
    "tool",
]
