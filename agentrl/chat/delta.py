"""The text that new messages add to a conversation, rendered without the conversation.

1. `[user, assistant(ANCHOR)] + new messages` is rendered, and the text from the first stop token after the anchor is
   the delta: the turn's end, the new messages as the template merges them, the generation prompt. Its cost depends on
   the new messages alone.
2. Before tool results the assistant message carries the calls with their real names and ids, because templates read
   them; tools and system prompt are left out, because no template repeats them.
3. Where a template has no stop token after a turn, the delta begins right behind the anchor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.chat.encoding import OPEN
from agentrl.chat.template import Template
from agentrl.errors import TemplateError
from agentrl.sample import Message

ANCHOR = "zqxAnchorzqx"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a template shows of a conversation."""

    system: bool
    """A system message is shown."""
    tools: bool
    """Tool schemas are shown; if not, the model never learns what it may call."""
    tool_messages: bool
    """Tool calls and tool results are shown."""
    parallel_calls: bool
    """Several calls in one turn are shown."""
    reasoning: bool
    """A message's reasoning is shown."""


class DeltaRenderer:
    """Renders deltas of one template; immutable, thread-safe."""

    def __init__(self, template: Template, capabilities: Capabilities, stops: Sequence[str]) -> None:
        self._template = template
        self._can = capabilities
        # A stop that stands in untrusted text is bracketed by marks and does not count.
        self._stop = re.compile(f"(?<!{OPEN})(?:{'|'.join(map(re.escape, stops))})") if stops else None

    def text(self, calls: Sequence[dict[str, Any]], new: Sequence[Message]) -> str:
        """The delta of `new` (normal form, marked) after a turn that made `calls` (OpenAI form, marked).

        Raises:
            TemplateError: the template refuses the messages, or loses the assistant message they follow.
        """
        calls = list(calls) if self._can.tool_messages else []
        if not self._can.parallel_calls:
            calls = calls[-1:]
        assistant: Message = {"role": "assistant", "content": "" if calls else ANCHOR}
        if calls:
            assistant["tool_calls"] = [*({**c, "function": _named(c, {})} for c in calls[:-1]), _anchored(calls[-1])]
        text = self._template.render([{"role": "user", "content": "u"}, assistant, *new])
        start = text.find(ANCHOR)
        if start < 0:
            raise TemplateError("the chat template does not show the assistant turn that new messages follow")
        end = start + len(ANCHOR)
        stop = self._stop.search(text, end) if self._stop else None
        return text[stop.start() if stop else end :]


def _named(call: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": arguments}


def _anchored(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": _named(call, {"k": ANCHOR})}
