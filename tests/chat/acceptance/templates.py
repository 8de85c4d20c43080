"""Turns as TRL's chat templates write them, extracted from the rendered text."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import jinja2

from agentrl.chat.probe import common
from tests.chat.acceptance.table import Output
from tests.support.assets import chat_templates
from tests.support.chats import STOPS

_KINDS = {
    "city": "string",
    "days": "integer",
    "exact": "boolean",
    "ratio": "number",
    "where": "object",
    "text": "string",
}
_PROPERTIES: dict[str, Any] = {name: {"type": kind, "description": "d"} for name, kind in _KINDS.items()}
_PROPERTIES["limit"] = {"type": ["integer", "null"], "description": "d"}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {
        "type": "object", "properties": _PROPERTIES}}}
    for name in ("get_weather", "echo")
]  # fmt: skip
WEATHER = {"city": "Zürich", "days": 3, "exact": True, "ratio": 0.5, "limit": None, "where": {"tags": ["a"], "max": 3}}
ECHO = {"text": 'line 1\n"quoted" {x}, [y]: é'}
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (("get_weather", WEATHER), ("echo", ECHO), ("get_weather", {}))
CASES = ("reasoning", "content", "parallel")
UNLIKE = {("gptoss", "content"), ("gptoss", "parallel")}
"""Templates that do not write what the model writes: gpt-oss moves text before a call to analysis, one call a turn."""


@cache
def rendered(name: str, tags: tuple[str, str], case: str) -> Output | None:
    """Return the turn that a template writes; None if it refuses the case. The output's id is the template's text."""
    template = chat_templates()[name]
    calls = {"reasoning": CALLS[:1], "content": CALLS[1:2], "parallel": CALLS}[case]
    said = {"reasoning_content": "Because.", "thinking": "Because."} if case == "reasoning" else {}
    message = {"role": "assistant", "content": "Text." if case == "content" else "", **said}
    prompt = _render(template, [])
    full = _render(template, [{**message, "tool_calls": _calls(calls, as_text=False)}])
    full = full or _render(template, [{**message, "tool_calls": _calls(calls, as_text=True)}])
    if prompt is None or full is None or (name, case) in UNLIKE:
        return None
    header = _whole_tags(full[: common(prompt, full)])
    text = _without_stop(full[len(header) :])
    reasoning, content = ("Because." if "Because." in text else ""), ("Text." if "Text." in text else "")
    return Output(template, header, text, TOOLS, content, reasoning, list(calls))


def _calls(calls: Sequence[tuple[str, Any]], *, as_text: bool) -> list[dict[str, Any]]:
    written = [(name, json.dumps(given, ensure_ascii=False) if as_text else given) for name, given in calls]
    functions = [{"name": name, "arguments": arguments} for name, arguments in written]
    return [{"type": "function", "id": f"call{n:05d}", "function": one} for n, one in enumerate(functions)]


def _render(template: str, turns: list[dict[str, Any]]) -> str | None:
    """Return the conversation's text, with a generation prompt if there is no assistant turn; None if it is refused."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "zqUser"}, *turns]
    tokens = {"bos_token": "", "eos_token": "<|im_end|>"}
    try:
        texts, _ = render_jinja_template(
            [messages], TOOLS, chat_template=template, add_generation_prompt=not turns, **tokens
        )
    except (jinja2.TemplateError, TypeError):
        return None
    return str(texts[0])


def _whole_tags(text: str) -> str:
    """Return the text without half a tag at its end: the common prefix of two texts may end in the `<` of two tags."""
    return text[: text.rfind("<")] if text.rfind("<") > text.rfind(">") else text


def _without_stop(text: str) -> str:
    """Return the text up to the token that ends generation."""
    stops = [stop for tokens in STOPS.values() for stop in tokens]
    text = text.rstrip()
    for stop in sorted(stops, key=len, reverse=True):
        text = text.removesuffix(stop).rstrip()
    return text
