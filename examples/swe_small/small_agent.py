"""An agent program with one tool, a shell, on the unmodified `openai` package, without any import of agentrl.

python small_agent.py "the task"        # OPENAI_BASE_URL and OPENAI_API_KEY are read by the package
"""

import json
import subprocess
import sys
from typing import Any

from openai import OpenAI

MAX_TURNS, SECONDS, SHOWN = 20, 60, 4000
SHELL: Any = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a shell command in the repository.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def shell(arguments: str) -> str:
    """Run the command of a tool call, and return its output."""
    try:
        done = subprocess.run(
            json.loads(arguments)["command"], shell=True, capture_output=True, text=True, timeout=SECONDS
        )
    except (ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
        return f"Error: {error!r}"
    return (done.stdout + done.stderr)[-SHOWN:] + f"\n[exit code {done.returncode}]"


def main(task: str) -> None:
    """Ask and run tools, until an answer has no tool calls."""
    client, messages = OpenAI(), [{"role": "user", "content": task}]
    for _ in range(MAX_TURNS):
        given: Any = messages
        message = client.chat.completions.create(model="policy", messages=given, tools=[SHELL]).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            called: Any = call
            messages.append({"role": "tool", "tool_call_id": call.id, "content": shell(called.function.arguments)})


if __name__ == "__main__":
    main(sys.argv[1])
