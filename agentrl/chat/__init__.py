"""Chat: messages to token ids and back, exactly.

1. `Chat.load(folder)` is a tokenizer with its template; `Conversation(chat, sample, messages, tools)` is one growing
   trajectory: `sampled(ids, ...)` and `show(messages)` in turns. `ChatSession` is its part that knows ids alone.
2. Sampled ids are never re-tokenised; text from users, tools and data never becomes a control token.
3. `print(chat.report)` says what the template does to history; `history_policy` says what to do about it.
4. This room imports neither torch nor ray; transformers only when a tokenizer is loaded.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.chat.chat import Chat, HistoryPolicy
    from agentrl.chat.conversation import Conversation, Shown
    from agentrl.chat.messages import ParsedTurn, ToolCall, ToolSchema, normalise_messages, normalise_tools
    from agentrl.chat.parsers import FAMILIES, REASONING, TurnParser, make_parser
    from agentrl.chat.report import Boundary, TemplateReport, Thought, Verdict
    from agentrl.chat.session import ChatSession, Delta

_HOMES = {
    "Chat": "agentrl.chat.chat",
    "HistoryPolicy": "agentrl.chat.chat",
    "Conversation": "agentrl.chat.conversation",
    "Shown": "agentrl.chat.conversation",
    "ParsedTurn": "agentrl.chat.messages",
    "ToolCall": "agentrl.chat.messages",
    "ToolSchema": "agentrl.chat.messages",
    "normalise_messages": "agentrl.chat.messages",
    "normalise_tools": "agentrl.chat.messages",
    "FAMILIES": "agentrl.chat.parsers",
    "REASONING": "agentrl.chat.parsers",
    "TurnParser": "agentrl.chat.parsers",
    "make_parser": "agentrl.chat.parsers",
    "Boundary": "agentrl.chat.report",
    "TemplateReport": "agentrl.chat.report",
    "Thought": "agentrl.chat.report",
    "Verdict": "agentrl.chat.report",
    "ChatSession": "agentrl.chat.session",
    "Delta": "agentrl.chat.session",
}

__all__ = [
    "FAMILIES",
    "REASONING",
    "Boundary",
    "Chat",
    "ChatSession",
    "Conversation",
    "Delta",
    "HistoryPolicy",
    "ParsedTurn",
    "Shown",
    "TemplateReport",
    "Thought",
    "ToolCall",
    "ToolSchema",
    "TurnParser",
    "Verdict",
    "make_parser",
    "normalise_messages",
    "normalise_tools",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'agentrl.chat' has no attribute {name!r}")
