"""Turning a model's text into OpenAI tool calls, with the parser that training uses."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import Chat
from agentrl.engine.embedded.model import Vocabulary, read_config
from agentrl.gateway.served.answers import ChatAnswers
from tests.support.tiny_models import make_tiny_model

CALL = 'Let me see.\n<tool_call>\n{"name": "calc", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "calc", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("hermes"))


def choice(model: Path, text: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    chat = Chat.load(str(model))
    vocab = Vocabulary(str(model), read_config(str(model)))
    meta = {"finish_reason": {"type": "stop", "matched": 2}}
    result = {"text": text, "output_ids": [2], "meta_info": meta}
    parser = chat.turn_parser if tools else chat.turn_parser.without_calls()
    return ChatAnswers({}, vocab, parser, tools).choice(0, result)


def test_a_call_is_taken_out_of_the_text(model: Path) -> None:
    one = choice(model, CALL, [TOOL])
    assert one["finish_reason"] == "tool_calls"
    assert one["message"]["content"] == "Let me see."
    assert len(one["message"]["tool_calls"][0]["id"]) == 9
    function = one["message"]["tool_calls"][0]["function"]
    assert function == {"name": "calc", "arguments": '{"a": 1}'}


def test_a_broken_call_is_text(model: Path) -> None:
    one = choice(model, CALL.replace("1}}", "1"), [TOOL])
    assert one["finish_reason"] == "stop"
    assert one["message"]["content"].split() == CALL.replace("1}}", "1").split()


def test_without_tools_the_text_stays(model: Path) -> None:
    one = choice(model, CALL, [])
    assert one["finish_reason"] == "stop"
    assert one["message"]["content"] == CALL
    assert "tool_calls" not in one["message"]
