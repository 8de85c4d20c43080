"""Parsers of model output: the same one in training and in evaluation.

1. `TurnParser` splits a turn's text into reasoning, content, calls and broken calls; it is immutable and cheap.
2. `make_parser` picks the formats by name, by the user's path (`pkg.mod:function`), or from the template ("auto")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.chat.messages import ParsedTurn, ToolCall, too_deep, whole_text
from agentrl.chat.parsers.base import TAGS, Parsed, ReasoningParser, ReasoningTags, Split, ToolCallParser, split_tags
from agentrl.chat.parsers.families import FAMILIES, OutputFormat, detect_family
from agentrl.chat.parsers.harmony import split_channels
from agentrl.errors import SettingsError
from agentrl.plugins import load_object

_BRACKET, _SEED, _GEMMA, _KIMI_K3, _COMMAND, _THINK = TAGS
_THINKERS = """
    think qwen3 qwen3-thinking deepseek-r1 deepseek-v3 deepseek-v4 kimi_k2 glm45 minimax step3 step3p5 nemotron_3 hunyuan
    hunyuan_a13b ernie45
"""
REASONING: Mapping[str, ReasoningTags | ReasoningParser | None] = {
    **dict.fromkeys(_THINKERS.split(), _THINK),
    "mistral": _BRACKET,
    "seed_oss": _SEED,
    "gemma4": _GEMMA,
    "kimi_k3": _KIMI_K3,
    "cohere_command4": _COMMAND,
    "gpt-oss": split_channels,
    "none": None,
}
"""Reasoning formats by name, with the names that SGLang uses for them."""


@dataclass(frozen=True, slots=True)
class TurnParser:
    """Parser of one model turn."""

    family: OutputFormat  # the format of tool calls
    reasoning: ReasoningTags | ReasoningParser | None  # the reasoning's tags, or a function that splits reasoning off
    opens_reasoning: bool = False  # the generation prompt already opened the reasoning

    @property
    def tags(self) -> ReasoningTags | None:
        """The tags around reasoning; None if the format has no tags."""
        return self.reasoning if isinstance(self.reasoning, ReasoningTags) else None

    @property
    def reads(self) -> bool:
        """True if the parser can find reasoning or calls."""
        return self.reasoning is not None or self.family.name != "none"

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] | None = None, *, first_call: int = 1) -> ParsedTurn:
        """Parse a turn's text (end token removed). Calls get the ids `call00001`, counted from `first_call`."""
        if self.reasoning is None or isinstance(self.reasoning, ReasoningTags):
            ends = (*self.family.begins, *self.family.answers)
            split = split_tags(text, self.reasoning, opened=self.opens_reasoning, begins=ends)
        else:
            split = self.reasoning(text)
        parsed = self.family.parse(split.rest, tools or ())
        deep = [f"the arguments of {name:.64} are nested too deeply" for name, given in parsed.calls if too_deep(given)]
        sound = [call for call in parsed.calls if not too_deep(call[1])]
        calls = tuple(
            ToolCall(f"call{number:05d}", whole_text(name), whole_text(arguments))
            for number, (name, arguments) in enumerate(sound, first_call)
        )
        return ParsedTurn(parsed.text.strip(), split.reasoning, calls, (*parsed.broken, *deep), split.open)

    def opened(self, opens_reasoning: bool) -> TurnParser:
        """Return the same parser for another generation prompt."""
        return replace(self, opens_reasoning=opens_reasoning)

    def without_calls(self) -> TurnParser:
        """Return the parser for turns without tools: calls are text, unless the format also marks the answer."""
        return self if self.family.answers else replace(self, family=FAMILIES["none"])


def make_parser(tool_call_parser: str, reasoning_parser: str, template: str) -> TurnParser:
    """Build the parser that two settings name; "auto" reads the template's text. Raises SettingsError: a name is not
    registered. PluginError: a path cannot be loaded."""
    family = detect_family(template) if tool_call_parser == "auto" else _named("tool-call", tool_call_parser, FAMILIES)
    if reasoning_parser == "auto":
        return TurnParser(family, detect_reasoning(template))
    return TurnParser(family, _named("reasoning", reasoning_parser, REASONING))


def _named(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    if name in known:
        return known[name]
    if ":" in name:
        function = load_object(name, what=f"--{kind}-parser")
        return OutputFormat(name, function) if kind == "tool-call" else function
    names = ", ".join(["auto", *known])
    raise SettingsError(f"--{kind}-parser {name!r} is not known; expected one of {names}, or 'pkg.mod:function'")


def detect_reasoning(template: str) -> ReasoningTags | ReasoningParser | None:
    if "<|channel|>analysis" in template:
        return split_channels
    if detect_family(template).name == "kimi_k3":  # its template assembles tags from pieces
        return _KIMI_K3
    return next((tags for tags in TAGS if tags.close in template), None)


__all__ = [
    "FAMILIES", "REASONING", "OutputFormat", "Parsed", "ReasoningTags", "Split", "ToolCallParser", "TurnParser", "make_parser"
]  # fmt: skip
