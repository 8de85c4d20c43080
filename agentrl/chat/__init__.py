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
    from agentrl.chat.chat import Chat
    from agentrl.chat.conversation import Conversation, Shown
    from agentrl.chat.messages import ParsedTurn, ToolCall, normalise_messages, normalise_tools
    from agentrl.chat.parsers import make_parser
    from agentrl.chat.report import Thought, Verdict
    from agentrl.chat.session import ChatSession

_HOMES = {
    "Chat": "chat",
    "ChatSession": "session",
    "Conversation": "conversation",
    "ParsedTurn": "messages",
    "Shown": "conversation",
    "Thought": "report",
    "ToolCall": "messages",
    "Verdict": "report",
    "make_parser": "parsers",
    "normalise_messages": "messages",
    "normalise_tools": "messages",
}

__all__ = [
    "Chat",
    "ChatSession",
    "Conversation",
    "ParsedTurn",
    "Shown",
    "Thought",
    "ToolCall",
    "Verdict",
    "make_parser",
    "normalise_messages",
    "normalise_tools",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"agentrl.chat.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'agentrl.chat' has no attribute {name!r}")
