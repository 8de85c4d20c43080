"""The text that a template writes for a turn, and if the parser reads it."""

import pytest

from agentrl.chat.probe import TOOL, assistant, result, user
from agentrl.chat.render_turn import render_turn, unread_call
from agentrl.chat.template import Template
from tests.support.chats import make_chat
from tests.support.nightly import nightly

NAMES = [
    "qwen2_5",
    "qwen3",
    "qwen3_5_think",
    "glm4moe",
    "llama3_1",
    "nemotron_3_nano",
    "gemma4_v5",
    "gptoss",
    "lfm2_v2",
]


@pytest.mark.parametrize("name", nightly([*NAMES, "deepseekv3"], ("qwen3", "glm4moe", "llama3_1", "gptoss")))
def test_what_the_template_writes_is_read_back(name: str) -> None:
    chat = make_chat(name)
    assert unread_call(chat) is None
    turn = chat.parse(render_turn(chat, assistant(2, calls=[1]), [TOOL]), [TOOL])
    assert [(call.name, call.arguments) for call in turn.tool_calls] == [("zqtool", {"a": "zqArg1zq"})]
    assert render_turn(chat, assistant(2)).strip().endswith("zqAsst2zq")


def test_a_format_without_a_parser_is_known() -> None:
    assert '<atem:invoke name="zqtool">' in (unread_call(make_chat("muse_glimmer")) or "")


def test_a_template_without_tool_calls_has_none_to_read() -> None:
    assert unread_call(make_chat("gemma3")) is None


def test_a_template_that_wants_no_content_beside_calls() -> None:
    """DeepSeek V3's template is like this, with arguments as text."""
    shown = (
        "{% if m.content is none %}{{ m.tool_calls[0].function.arguments + '!' }}{% else %}{{ m.content }}{% endif %}"
    )
    template = Template("{% for m in messages %}" + shown + "{% endfor %}", {})
    messages = [user(1), assistant(1, calls=[1], content=False), assistant(2)]
    assert template.render(messages, generation_prompt=False) == 'zqUser1zq{"a": "zqArg1zq"}!zqAsst2zq'


def test_a_template_that_shows_ids_for_names() -> None:
    """Kimi K2's template is like this; the model numbers its calls from 0."""
    shown = "{% for c in m.tool_calls %}<{{ c.id }}>{{ c.function.arguments.a }}{% endfor %}{{ m.tool_call_id }}"
    template = Template("{% for m in messages %}" + shown + "{{ m.content }}{% endfor %}", {})
    messages = [user(1), assistant(1, calls=[1, 2], content=False), result(2)]
    written = "zqUser1zq<functions.zqtool:0>zqArg1zq<functions.zqtool:1>zqArg2zqfunctions.zqtool:1zqTool2zq"
    assert template.render(messages, generation_prompt=False) == written
