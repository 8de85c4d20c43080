"""Random tool-using conversations, and the text that a model must write to produce them."""

import re
from typing import Any

from hypothesis import strategies as st

from agentrl.chat import Chat, Thought

Message = dict[str, Any]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run_sql",
            "description": "Run a query.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "SQL"}, "limit": {"type": "integer"}},
                "required": ["query"],
            },
        },
    }
]
_WORDS = ["the", "cat", "42", "3.14", "naïve", "東京", "🙂", '{"k": [1, 2]}', "x+1;", "http://a.b/c?d=e", "two  spaces"]
_GAPS = [" ", " ", "\n", "\n\n", ". "]


@st.composite
def text(draw: st.DrawFn) -> str:
    """Draw some words, never blank and without leading or trailing whitespace, which some templates strip."""
    words = draw(st.lists(st.tuples(st.sampled_from(_WORDS), st.sampled_from(_GAPS)), min_size=1, max_size=8))
    return "".join(word + gap for word, gap in words).strip()


@st.composite
def conversations(draw: st.DrawFn, chat: Chat, thought: Thought) -> list[Message]:
    """Draw a conversation that ends with a user or tool message. All assistant turns have the same kind of thought."""
    can = chat.report.can
    messages: list[Message] = []
    if can.system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(text())})
    messages.append({"role": "user", "content": draw(text())})
    calls_made = 0
    for kind in draw(st.lists(st.sampled_from(["call", "call", "answer"]), min_size=1, max_size=5)):
        turn: Message = {"role": "assistant", "content": draw(text())}
        if thought is Thought.WITH:
            turn["reasoning_content"] = draw(text())
        messages.append(turn)
        if kind == "answer" or not can.tool_messages:
            messages.append({"role": "user", "content": draw(text())})
            continue
        count = draw(st.integers(1, 3)) if can.parallel_calls else 1
        if draw(st.booleans()) or not can.parallel_calls:
            turn["content"] = ""
        turn["tool_calls"] = [_call(draw, calls_made + i + 1) for i in range(count)]
        calls_made += count
        for call in turn["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": "run_sql", "content": draw(text())})
    return messages


def _call(draw: st.DrawFn, number: int) -> dict[str, Any]:
    arguments = {"query": draw(text()), "limit": draw(st.integers(0, 99))}
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": "run_sql", "arguments": arguments}}


def turns(messages: list[Message]) -> list[tuple[int, int]]:
    """Return (index of an assistant message, index after the messages that answer it), in order."""
    at = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return list(zip(at, [*at[1:], len(messages)], strict=True))


def completion(chat: Chat, messages: list[Message], tools: Any, thought: Thought) -> str:
    """Return what the model writes for the last message: the template's text of it, up to the first end token."""
    prompt = chat.template.render(messages[:-1], tools)
    written = chat.template.render(messages, tools, generation_prompt=False)
    shared = next((i for i, (a, b) in enumerate(zip(prompt, written, strict=False)) if a != b), len(prompt))
    body = written[shared:]
    stop = re.search("|".join(map(re.escape, chat.report.stops)), body)
    body = body[: stop.end()] if stop else body
    return re.sub(r"^\s*<think>\s*</think>\s*", "", body) if thought is Thought.WITHOUT else body
