"""The probe's findings in real templates, and the text of the report."""

import sys
from subprocess import run

import pytest

from agentrl.chat import Thought, Verdict
from tests.support.chats import make_chat
from tests.support.nightly import nightly

ALL = tuple(Thought)


def test_qwen3() -> None:
    report = make_chat("qwen3").report
    assert report.generation_prompt == "<|im_start|>assistant\n"
    assert report.closers == ("<|im_end|>",)
    assert report.predict("tool", [Thought.WITH]) is Verdict.EXACT
    assert report.predict("user", [Thought.WITH]) is Verdict.REASONING_DROPPED
    assert report.predict("tool", [Thought.EMPTY]) is Verdict.REWRITTEN
    assert report.predict("user", [Thought.WITHOUT]) is Verdict.EXACT
    assert report.predict("user", [Thought.WITH, Thought.WITHOUT]) is Verdict.REASONING_DROPPED


@pytest.mark.parametrize(
    ("name", "closers", "opens", "family"),
    [
        ("qwen2_5", ("<|im_end|>",), False, "hermes"),
        ("llama3_1", ("<|eot_id|>",), False, "llama3"),
        ("glm4moe", (), False, "glm"),
        ("gptoss", ("<|return|>", "<|end|>"), False, "gpt-oss"),
        ("deepseekv3", ("<｜end▁of▁sentence｜>",), True, "deepseekv3"),
        ("qwen3_5_think", ("<|im_end|>",), True, "qwen_xml"),
        ("gemma4_v2", ("<turn|>",), False, "gemma4"),
        ("cohere2", ("<|END_OF_TURN_TOKEN|>",), False, "none"),
    ],
)
def test_turn_ends_and_parsers(name: str, closers: tuple[str, ...], opens: bool, family: str) -> None:
    chat = make_chat(name)
    assert chat.report.closers == closers
    assert chat.report.opens_reasoning is opens
    assert chat.turn_parser.family.name == family


def test_templates_that_keep_state_are_told() -> None:
    report = make_chat("deepseekv3").report
    assert any(b.verdict is Verdict.DELTA_DIFFERS for b in report.boundaries)
    assert any("behind a real history" in note for note in report.warnings())


def test_capabilities_and_warnings() -> None:
    phi = make_chat("phi3_5").report
    assert (phi.can.tools, phi.can.tool_messages) == (False, False)
    assert phi.predict("tool") is Verdict.REFUSED
    assert any("tool schemas are ignored" in note for note in phi.warnings())
    llama = make_chat("llama3_1").report
    assert (llama.can.tool_messages, llama.can.parallel_calls) == (True, False)
    assert any("one tool call" in note for note in llama.warnings())
    assert make_chat("gptoss").report.uses_date


@pytest.mark.parametrize(
    ("name", "kwargs"),
    nightly(
        [
            ("nemotron_3_nano", {"truncate_history_thinking": False}),
            ("qwen3_6", {"preserve_thinking": True}),
            ("lfm2_2_5", {"preserve_thinking": True}),
            ("qwen3", {}),
        ],
        2,
    ),
)
def test_a_template_argument_that_keeps_history_is_used_first(name: str, kwargs: dict[str, bool]) -> None:
    chat = make_chat(name)
    assert chat.report.history_kwargs == kwargs
    assert chat.template.kwargs == kwargs
    if kwargs:
        assert chat.report.predict("user", [Thought.WITH]) in (Verdict.EXACT, Verdict.MERGES)


def test_it_prints_for_people() -> None:
    text = str(make_chat("qwen3").report)
    assert "generation prompt    '<|im_start|>assistant\\n'" in text
    assert "boundaries           12 of 24 exact" in text
    assert "answer, then user" in text
    assert "note: history would be rewritten" in text


def test_importing_the_package_is_light() -> None:
    code = "import sys, agentrl.chat; from agentrl.chat import make_parser, Chat; print(sorted(sys.modules))"
    modules = run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600).stdout
    for heavy in ("'torch'", "'ray'", "'transformers'", "'tokenizers'", "'jinja2'"):
        assert heavy not in modules
