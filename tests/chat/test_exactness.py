"""The ids of a growing conversation equal the template's own full rendering wherever the report says so."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.chat import Chat, ChatSession, ParsedTurn, Thought, Verdict
from agentrl.chat.probe import TOOL, assistant, result, user
from tests.support.chats import make_chat
from tests.support.conversations import TOOLS, Message, completion, conversations, turns
from tests.support.nightly import examples, nightly

SETTINGS = settings(
    max_examples=examples(0.15),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
ALWAYS_EXACT = [
    "qwen2_5",
    "qwen3_instruct_2507",
    "llama3_1",
    "llama3_2",
    "lfm2_2_5",
    "lfm2_v2",
    "gemma4_v2",
    "muse_glimmer",
]
PARTLY_EXACT = [
    "qwen3",
    "qwen3_training",
    "glm4moe",
    "nemotron_3_nano",
    "qwen3_5_think_training",
    "qwen3_6",
    "gemma3",
    "gemma4_v5",
    "gptoss",
]


EVERYDAY = ("qwen3", "qwen3_5_think_training", "gptoss")
"""The templates that are nearest to and farthest from the model's own form."""
REWRITTEN = ("gemma4", "gptoss")
"""Templates that render an earlier turn differently once others follow. The rendering then has no prefix in common."""


def assert_parsed(chat: Chat, turn: ParsedTurn, message: Message, text: str) -> None:
    """Check that the format's parser, if any, reads back what the template wrote."""
    if chat.turn_parser.family.name == "none":
        return
    written = [call["function"] for call in message.get("tool_calls", [])]
    assert [(c.name, c.arguments) for c in turn.tool_calls] == [(c["name"], c["arguments"]) for c in written]
    assert turn.broken == ()
    assert turn.content == message["content"]
    if chat.turn_parser.tags and message.get("reasoning_content", "") in text:  # some templates leave it out
        assert turn.reasoning == message.get("reasoning_content")


def grow(name: str, data: st.DataObject, thought: Thought) -> tuple[int, int]:
    """Play a random conversation. Returns the number of boundaries with promised exactness, and of all."""
    chat = make_chat(name)
    tools = TOOLS if chat.report.can.tools else None
    messages = data.draw(conversations(chat, thought))
    steps = turns(messages)
    session = ChatSession(chat, messages[: steps[0][0]], tools)
    exact, ids = 0, list(session.prompt_ids)
    promised = True
    for at, end in steps:
        text = completion(chat, messages[: at + 1], tools, thought)
        sampled = chat.encode(text)
        turn, seen = session.append_model_turn(sampled), chat.decode(ids)
        written = chat.template.render(messages[: at + 1], tools, generation_prompt=False)
        if not name.startswith(REWRITTEN) or written.startswith(seen):
            assert_parsed(chat, turn, messages[at], text)
        delta = session.extend(messages[at + 1 : end])
        ids += sampled + delta.close + delta.env
        promised = promised and delta.verdict is Verdict.EXACT
        if promised:
            exact += 1
            assert ids == chat.render_ids(messages[:end], tools)
    return exact, len(steps)


@pytest.mark.parametrize("name", nightly(ALWAYS_EXACT, ("qwen2_5", "llama3_1")))
@SETTINGS
@given(data=st.data())
def test_append_only_templates_are_always_exact(name: str, data: st.DataObject) -> None:
    chat = make_chat(name)
    kinds = [Thought.WITH, Thought.WITHOUT] if chat.report.can.reasoning else [Thought.WITHOUT]
    exact, every = grow(name, data, data.draw(st.sampled_from(kinds)))
    assert exact == every


@pytest.mark.parametrize("thought", [Thought.WITH, Thought.WITHOUT])
@pytest.mark.parametrize("name", nightly(PARTLY_EXACT, EVERYDAY))
@SETTINGS
@given(data=st.data())
def test_what_is_promised_is_exact(name: str, thought: Thought, data: st.DataObject) -> None:
    grow(name, data, thought)


@pytest.mark.parametrize("thought", [Thought.WITH, Thought.WITHOUT])
@pytest.mark.parametrize("name", ["gemma4_v5", "gptoss"])
def test_calls_without_text_beside_them_are_exact(name: str, thought: Thought) -> None:
    """These two templates rewrite turns that have text and calls; a tool loop has no such turns."""
    chat, reasoning = make_chat(name), thought is Thought.WITH
    messages = [user(1)]
    session = ChatSession(chat, messages, [TOOL])
    ids = list(session.prompt_ids)
    for number in (1, 2):
        messages.append(assistant(number, reasoning=reasoning, calls=[number], content=False))
        sampled = chat.encode(completion(chat, messages, [TOOL], thought))
        turn = session.append_model_turn(sampled)
        assert [call.arguments for call in turn.tool_calls] == [{"a": f"zqArg{number}zq"}]
        assert turn.reasoning == (f"zqReason{number}zq" if reasoning else None)
        delta = session.extend([result(number)])
        messages.append(result(number))
        ids += sampled + delta.close + delta.env
        assert (delta.verdict, delta.close) == (Verdict.EXACT, [])
        assert ids == chat.render_ids(messages, [TOOL])
    session.append_model_turn(chat.encode(f"Text.{completion(chat, messages[:2], [TOOL], Thought.WITHOUT)}"))
    assert session.extend([result(1)]).verdict is not Verdict.EXACT or name == "gptoss"


@pytest.mark.slow
@pytest.mark.parametrize("thought", [Thought.WITH, Thought.WITHOUT])
@settings(SETTINGS, max_examples=150)
@given(data=st.data())
def test_what_is_promised_is_exact_everywhere(thought: Thought, data: st.DataObject) -> None:
    """All templates except image templates and those that need a BOS that the Qwen3 tokenizer lacks."""
    from tests.support.assets import chat_templates

    without = ("idefics3", "smolvlm", "llava_next", "qwen2_5_vl", "llama3", "gemma", "deepseek", "gptoss", "diffusion")
    names = [*ALWAYS_EXACT, *(n for n in chat_templates() if not n.startswith(without))]
    grow(data.draw(st.sampled_from(names)), data, thought)
