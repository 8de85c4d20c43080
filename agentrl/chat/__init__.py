"""Chat: messages to token ids and back, exactly.

1. `Chat.load(folder)` returns a tokenizer with its template. `Conversation(chat, sample, messages, tools)` is a growing
   trajectory: call `append_model_turn` and `append_messages` alternately. `ChatSession` is its part for ids alone.
2. Sampled ids are never re-tokenised; text from users, tools and data never becomes a control token.
3. `print(chat.report)` shows how the template changes history; `template_rewrite_policy` decides what follows.
4. This package imports neither torch nor ray; transformers only when a tokenizer is loaded."""

from agentrl.chat.chat import Chat
from agentrl.chat.conversation import AppendResult, Conversation
from agentrl.chat.messages import ParsedTurn, ToolCall, normalise_messages
from agentrl.chat.parsers import TurnParser, make_parser
from agentrl.chat.report import Thought, Verdict
from agentrl.chat.session import ChatSession

__all__ = [
    "AppendResult", "Chat", "ChatSession", "Conversation", "ParsedTurn", "Thought", "ToolCall", "TurnParser",
    "Verdict", "make_parser", "normalise_messages",
]  # fmt: skip
