"""Parsers of model output: the same one in training and in evaluation.

1. `TurnParser` splits a turn's text into reasoning, content, calls and broken calls; it is immutable and cheap.
2. `make_parser` picks the family by name, by the user's own path (`pkg.mod:function`), or from the template ("auto").
3. Parsers never raise on a model's text and never guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.chat.messages import ParsedTurn, ToolCall, whole_text
from agentrl.chat.parsers.base import Parsed, ToolCallParser
from agentrl.chat.parsers.glm import parse_glm
from agentrl.chat.parsers.hermes import parse_hermes
from agentrl.chat.parsers.llama3 import parse_llama3
from agentrl.chat.parsers.qwen_xml import parse_qwen_xml
from agentrl.chat.parsers.reasoning import BRACKET_THINK, THINK, ReasoningTags, split_reasoning
from agentrl.errors import SettingsError
from agentrl.plugins import load_object


def parse_none(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """The parser of models that call no tools: everything is text."""
    return Parsed(text)


@dataclass(frozen=True, slots=True)
class Family:
    """One output format: how calls are read, and the text that begins one (None if a call has no marker)."""

    name: str
    parse: ToolCallParser
    call_marker: str | None = None


_HERMES = Family("hermes", parse_hermes, "<tool_call>")
_QWEN_XML = Family("qwen_xml", parse_qwen_xml, "<tool_call>")
_GLM = Family("glm", parse_glm, "<tool_call>")
_LLAMA3 = Family("llama3", parse_llama3)
_NONE = Family("none", parse_none)
FAMILIES: Mapping[str, Family] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "qwen3": _HERMES,
    "qwen_xml": _QWEN_XML,
    "qwen3_coder": _QWEN_XML,
    "glm": _GLM,
    "glm45": _GLM,
    "glm47": _GLM,
    "llama3": _LLAMA3,
    "none": _NONE,
}
"""Tool-call formats by name, with the names that SGLang uses for them."""

REASONING: Mapping[str, ReasoningTags | None] = {
    "think": THINK,
    "qwen3": THINK,
    "deepseek-r1": THINK,
    "mistral": BRACKET_THINK,
    "none": None,
}
"""Reasoning formats by name, with the names that SGLang uses for them."""


@dataclass(frozen=True, slots=True)
class TurnParser:
    """Reads one model turn. `opens_reasoning`: the generation prompt already opened the reasoning."""

    family: Family
    tags: ReasoningTags | None
    opens_reasoning: bool = False

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] | None = None, *, first_call: int = 1) -> ParsedTurn:
        """Parse a turn's text (end token removed). Calls get the ids `call00001`, counted from `first_call`."""
        split = split_reasoning(text, self.tags, opened=self.opens_reasoning, call_marker=self.family.call_marker)
        parsed = self.family.parse(split.rest, tools or ())
        calls = tuple(
            ToolCall(f"call{number:05d}", whole_text(name), whole_text(arguments))
            for number, (name, arguments) in enumerate(parsed.calls, first_call)
        )
        return ParsedTurn(parsed.text.strip(), split.reasoning, calls, tuple(parsed.broken), split.open)

    def opened(self, opens_reasoning: bool) -> TurnParser:
        """The same parser for another generation prompt."""
        return replace(self, opens_reasoning=opens_reasoning)

    def without_calls(self) -> TurnParser:
        """The same parser where there are no tools: calls are text."""
        return replace(self, family=_NONE)


def make_parser(tool_call_parser: str, reasoning_parser: str, template: str) -> TurnParser:
    """Build the parser that two settings name; "auto" reads the template's text.

    Raises:
        SettingsError: a name that is not registered.
        PluginError: a path that cannot be loaded.
    """
    family = detect_family(template) if tool_call_parser == "auto" else _family(tool_call_parser)
    if reasoning_parser == "auto":
        return TurnParser(family, detect_reasoning(template))
    if reasoning_parser not in REASONING:
        known = ", ".join(["auto", *REASONING])
        raise SettingsError(f"--reasoning-parser {reasoning_parser!r} is not known; expected one of {known}")
    return TurnParser(family, REASONING[reasoning_parser])


def _family(name: str) -> Family:
    if name in FAMILIES:
        return FAMILIES[name]
    if ":" in name:
        return Family(name, load_object(name, what="--tool-call-parser"))
    known = ", ".join(["auto", *FAMILIES])
    raise SettingsError(f"--tool-call-parser {name!r} is not known; expected one of {known}, or 'pkg.mod:function'")


def detect_family(template: str) -> Family:
    """The tool-call format that a chat template writes; `none` where no registered family matches."""
    if "<function=" in template and "<parameter=" in template:
        return _QWEN_XML
    if "<arg_key>" in template and "<arg_value>" in template:
        return _GLM
    if "<tool_call>" in template and '"arguments"' in template:
        return _HERMES
    if '"parameters": ' in template and "<|start_header_id|>" in template:
        return _LLAMA3
    return _NONE


def detect_reasoning(template: str) -> ReasoningTags | None:
    """The reasoning tags that a chat template knows."""
    return next((tags for tags in (THINK, BRACKET_THINK) if tags.close in template), None)


__all__ = ["FAMILIES", "REASONING", "Family", "Parsed", "ReasoningTags", "ToolCallParser", "TurnParser", "make_parser"]
