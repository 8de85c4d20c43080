"""A chat template, compiled once, rendered from messages in the normal form of `messages.py`. The environment is
transformers' own sandboxed Jinja, with limits (`jinja.py`). Differences between templates (arguments, content parts,
names of reasoning) are detected once, and messages adapted. Errors of a template become a `TemplateError`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.chat.encoding import OPEN
from agentrl.chat.messages import REASONING_KEYS, ToolSchema, arguments_text
from agentrl.errors import TemplateError
from agentrl.sample import Message

_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
ANCHOR = "zqxAnchorzqx"
_MAX_SOURCE = 1 << 20


class Template:
    """A compiled template with its fixed keyword arguments; immutable, thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], kwargs: Mapping[str, Any] | None = None) -> None:
        from agentrl.chat.jinja import environment  # Jinja is not needed to import this package

        if len(source) > _MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source):,} characters; expected at most {_MAX_SOURCE:,}")
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.kwargs = dict(kwargs or {})
        try:
            self._environment = environment()
            self._compiled = self._environment.from_string(source)
            self._compiled.globals = self._environment.globals  # the same, without a ChainMap to copy at each rendering
        except Exception as error:  # jinja2's syntax errors and transformers' version errors alike
            raise TemplateError(f"the chat template does not compile: {_said(error)}") from error
        self._text_arguments = self._content_parts = self._no_content = self._named_ids = False
        self._probe_forms()

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> Template:
        return Template(self.source, self.special_tokens, {**self.kwargs, **kwargs})

    def variables(self) -> frozenset[str]:
        """Return the names of the keyword arguments that the template reads."""
        from jinja2 import meta

        names = meta.find_undeclared_variables(self._environment.parse(self.source))
        return frozenset(names - _GIVEN - set(self.special_tokens))

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None, *, generation_prompt: bool = True
    ) -> str:
        """Render messages in the normal form. Raises TemplateError: the template refuses the messages, or fails."""
        try:
            return self._environment.rendered(
                self._compiled,
                messages=[self._adapt(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
                **{**self.special_tokens, **self.kwargs},
            )
        except Exception as error:  # a template is a program: it can raise anything
            given = f"{len(messages)} messages, the last with roles {' '.join(m['role'] for m in messages[-9:])}"
            raise TemplateError(f"the chat template cannot render {given}: {_said(error)}") from error

    def _adapt(self, message: Message) -> Message:
        out = dict(message)
        if (reasoning := out.get("reasoning_content")) is not None:
            out |= dict.fromkeys(REASONING_KEYS, reasoning)
        if self._content_parts and isinstance(out["content"], str):
            out["content"] = [{"type": "text", "text": out["content"]}]
        if self._no_content and not message["content"] and message.get("tool_calls"):
            out["content"] = None  # DeepSeek V3
        calls = out.get("tool_calls", [])
        if self._text_arguments and calls:
            calls = out["tool_calls"] = [_with_arguments(c, arguments_text(c["function"]["arguments"])) for c in calls]
        if self._named_ids and calls:
            out["tool_calls"] = [{**call, "id": _named_id(call["id"], call["function"]["name"])} for call in calls]
        elif self._named_ids and "tool_call_id" in out:
            out["tool_call_id"] = _named_id(out["tool_call_id"], out.get("name", "tool"))
        return out

    def _probe_forms(self) -> None:
        user: Message = {"role": "user", "content": "zqUserzq"}
        if not self._shows("zqUserzq", [user]):
            self._content_parts = True
            self._content_parts = self._shows("zqUserzq", [user])
        call = {"type": "function", "id": "call00001", "function": {"name": "zqfn", "arguments": {"a": "zqArgzq"}}}
        calling = [user, {"role": "assistant", "content": "", "tool_calls": [call]}]
        for self._text_arguments, self._no_content in ((False, False), (True, False), (False, True), (True, True)):
            if self._shows("zqArgzq", calling):
                self._named_ids = self._shows("call00001", calling) and not self._shows("zqfn", calling)
                return
        self._text_arguments = self._no_content = False

    def _shows(self, needle: str, messages: list[Message]) -> bool:
        try:
            return needle in self.render(messages, generation_prompt=False)
        except TemplateError:
            return False


def _said(error: Exception) -> str:
    return (str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}")[:1000]


def _named_id(id_: str, name: str) -> str:
    """Return our id of a call in Kimi K2's form. Its template shows the tool's name only in the id."""
    ours = re.fullmatch(r"call(\d{5,})", id_)
    return f"functions.{name}:{int(ours[1]) - 1}" if ours else id_


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The parts of a conversation that a template shows."""

    system: bool  # a system message is shown
    tools: bool  # tool schemas are shown; if not, the model does not know its tools
    tool_messages: bool  # tool calls and tool results are shown
    parallel_calls: bool  # several calls in one turn are shown
    reasoning: bool  # a message's reasoning is shown


class DeltaRenderer:
    """The text that new messages add to a conversation, rendered without the conversation; immutable, thread-safe.

    It renders `[user, assistant(ANCHOR)] + new messages`. The delta begins at the first stop token after the anchor,
    else at the anchor's end. It has the turn's end, the new messages as the template merges them, and the generation
    prompt. The cost depends only on the new messages. Before tool results, the assistant message has the calls' real
    names and ids, because templates read them. Tools and system prompt are never repeated."""

    def __init__(self, template: Template, capabilities: Capabilities, stops: Sequence[str]) -> None:
        self._template = template
        self._can = capabilities
        # A stop in untrusted text follows a mark, and does not count.
        self._stop = re.compile(f"(?<!{OPEN})(?:{'|'.join(map(re.escape, stops))})") if stops else None

    def text(self, calls: Sequence[dict[str, Any]], new: Sequence[Message]) -> str:
        """Return the delta of `new` (normal form, marked) after a turn that made `calls` (OpenAI form, marked).
        Raises TemplateError: the template refuses the messages, or omits the assistant message before them."""
        calls = list(calls) if self._can.tool_messages else []
        if not self._can.parallel_calls:
            calls = calls[-1:]
        assistant: Message = {"role": "assistant", "content": "" if calls else ANCHOR}
        if calls:
            named = [_with_arguments(call, {}) for call in calls[:-1]]
            assistant["tool_calls"] = [*named, _with_arguments(calls[-1], {"k": ANCHOR})]
        text = self._template.render([{"role": "user", "content": "u"}, assistant, *new])
        if (start := text.find(ANCHOR)) < 0:
            raise TemplateError("the chat template does not show the assistant turn that new messages follow")
        end = start + len(ANCHOR)
        stop = self._stop.search(text, end) if self._stop else None
        return text[stop.start() if stop else end :]


def _with_arguments(call: dict[str, Any], arguments: dict[str, Any] | str) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}
