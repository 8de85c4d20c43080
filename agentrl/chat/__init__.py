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
    from agentrl.chat.chat import Chat as Chat
    from agentrl.chat.conversation import Conversation as Conversation
    from agentrl.chat.conversation import Shown as Shown
    from agentrl.chat.messages import ParsedTurn as ParsedTurn
    from agentrl.chat.messages import ToolCall as ToolCall
    from agentrl.chat.messages import normalise_messages as normalise_messages
    from agentrl.chat.messages import normalise_tools as normalise_tools
    from agentrl.chat.parsers import make_parser as make_parser
    from agentrl.chat.report import Thought as Thought
    from agentrl.chat.report import Verdict as Verdict
    from agentrl.chat.session import ChatSession as ChatSession

_HOMES = {
    **dict.fromkeys(("Chat",), "chat"),
    **dict.fromkeys(("Conversation", "Shown"), "conversation"),
    **dict.fromkeys(("ParsedTurn", "ToolCall", "normalise_messages", "normalise_tools"), "messages"),
    **dict.fromkeys(("make_parser",), "parsers"),
    **dict.fromkeys(("Thought", "Verdict"), "report"),
    **dict.fromkeys(("ChatSession",), "session"),
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
