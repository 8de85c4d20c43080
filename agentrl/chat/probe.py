"""Probing a chat template with a few dozen small renderings.

1. `probe` returns a `TemplateReport` in about 30 ms.
2. A boundary's verdict compares `prompt ids + completion ids + delta ids` with the ids of the template's own full
   rendering. The completion is the template's text for that turn, with or without its reasoning block.
3. `choose_history_kwargs` tries the arguments by which known templates keep their history."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from agentrl.chat.encoding import Codec
from agentrl.chat.parsers import ReasoningTags
from agentrl.chat.report import Boundary, TemplateReport, Thought, Verdict
from agentrl.chat.template import Capabilities, DeltaRenderer, Template
from agentrl.errors import TemplateError
from agentrl.sample import Message

HISTORY_KWARGS: Mapping[str, bool] = {
    **dict.fromkeys(("preserve_thinking", "keep_past_thinking", "keep_all_reasoning"), True),
    **dict.fromkeys(("clear_thinking", "truncate_history_thinking", "auto_drop_analysis", "drop_thinking"), False),
}
"""Arguments of templates, with the values that keep reasoning in history."""
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "A value."}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "zqtool", "description": "A tool.", "parameters": _PARAMETERS}}


def user(number: int) -> Message:
    return {"role": "user", "content": f"zqUser{number}zq"}


def assistant(number: int, *, reasoning: bool = False, calls: Sequence[int] = (), content: bool = True) -> Message:
    message: Message = {"role": "assistant", "content": f"zqAsst{number}zq" if content else ""}
    if reasoning:
        message["reasoning_content"] = f"zqReason{number}zq"
    if calls:
        functions = {call: {"name": "zqtool", "arguments": {"a": f"zqArg{call}zq"}} for call in calls}
        made = ({"id": f"call{call:05d}", "type": "function", "function": f} for call, f in functions.items())
        message["tool_calls"] = list(made)
    return message


def result(call: int) -> Message:
    return {"role": "tool", "tool_call_id": f"call{call:05d}", "name": "zqtool", "content": f"zqTool{call}zq"}


def probe(
    template: Template, codec: Codec, stops: Sequence[str], tags: ReasoningTags | None, chosen: Mapping[str, Any]
) -> TemplateReport:
    """Return the report of `template`, whose arguments already include the `chosen` history arguments."""
    return _Probe(template, codec, tuple(stops), tags).report(chosen)


def choose_history_kwargs(
    template: Template, codec: Codec, stops: Sequence[str], tags: ReasoningTags | None
) -> dict[str, Any]:
    """Return the known history arguments that make more boundaries exact, except arguments that the user set."""
    read = template.variables()
    if not (known := {k: v for k, v in HISTORY_KWARGS.items() if k in read and k not in template.kwargs}):
        return {}
    plain = probe(template, codec, stops, tags, {}).exact_count
    return {
        name: value
        for name, value in known.items()
        if probe(template.with_kwargs({name: value}), codec, stops, tags, {name: value}).exact_count > plain
    }


def find_closer(template: Template, codec: Codec, stops: Sequence[str]) -> str | None:
    """Return the token that closes a final answer: the first stop after the answer, else the first special token."""
    try:
        text = template.render([user(1), assistant(1)], generation_prompt=False)
    except TemplateError:
        return None
    after = text.partition("zqAsst1zq")[2]
    for candidates in (stops, sorted(codec.special, key=len, reverse=True)):
        if hits := [(after.find(token), -len(token), token) for token in candidates if token and token in after]:
            return min(hits)[2]
    return None


@dataclass(frozen=True)
class _Probe:
    template: Template
    codec: Codec
    stops: tuple[str, ...]
    tags: ReasoningTags | None

    def report(self, chosen: Mapping[str, Any]) -> TemplateReport:
        prompt = self._render([user(1)], self.tools) or ""
        dates = [datetime.now().strftime(form) for form in ("%Y-%m-%d", "%d %b %Y", "%B %d, %Y", "%d %B %Y")]
        begin = _behind_user(prompt)
        without = _behind_user(self._render([user(1)], None, generation_prompt=False) or "")
        return TemplateReport(
            can=self.can,
            generation_prompt=begin.removeprefix(without),
            opens_reasoning=self._opens(begin),
            stops=self.stops,
            closers=self.closers,
            history_kwargs=dict(chosen),
            uses_date="strftime_now" in self.template.source and any(date in prompt for date in dates),
            boundaries=tuple(self._boundaries()),
        )

    def _render(self, messages: Sequence[Message], tools: Any = None, generation_prompt: bool = True) -> str | None:
        try:
            return self.template.render(messages, tools, generation_prompt=generation_prompt)
        except TemplateError:
            return None

    def _shows(self, messages: Sequence[Message], *needles: str, tools: Any = None) -> bool:
        text = self._render(messages, tools, generation_prompt=False) or ""
        return all(needle in text for needle in needles)

    @cached_property
    def can(self) -> Capabilities:
        one = [user(1), assistant(1, calls=[1], content=False), result(1), assistant(2)]
        two = [user(1), assistant(1, calls=[1, 2], content=False), result(1), result(2), assistant(2)]
        return Capabilities(
            system=self._shows([{"role": "system", "content": "zqSyszq"}, user(1)], "zqSyszq"),
            tools=self._shows([user(1)], "zqtool", tools=[TOOL]),
            tool_messages=self._shows(one, "zqArg1zq", "zqTool1zq"),
            parallel_calls=self._shows(two, "zqArg1zq", "zqArg2zq", "zqTool1zq", "zqTool2zq"),
            reasoning=self._shows([user(1), assistant(1, reasoning=True)], "zqReason1zq"),
        )

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        return [TOOL] if self.can.tools else None

    def _opens(self, prompt: str) -> bool:
        return self.tags is not None and prompt.rfind(self.tags.open) > prompt.rfind(self.tags.close)

    @cached_property
    def closers(self) -> tuple[str, ...]:
        """Texts that close a turn: stops, and their replacements in history (gpt-oss: `<|end|>` for `<|return|>`).
        Empty if no stop follows a final answer: stops then open the next turn."""
        final, past = [user(1), assistant(1)], [user(1), assistant(1), user(2)]
        if (last := self._first_stop(final, generation_prompt=False)) is None:
            return ()
        instead = self._behind(past) if self._behind(final, generation_prompt=False) == last else None
        return tuple(dict.fromkeys(stop for stop in (last, self._first_stop(past), instead) if stop))

    def _behind(self, messages: list[Message], generation_prompt: bool = True) -> str | None:
        """Return the control token directly after the answer, or None."""
        after = (self._render(messages, None, generation_prompt) or "").partition("zqAsst1zq")[2].lstrip()
        return max((token for token in self.codec.special if token and after.startswith(token)), key=len, default=None)

    def _first_stop(self, messages: list[Message], generation_prompt: bool = True) -> str | None:
        after = (self._render(messages, None, generation_prompt) or "").partition("zqAsst1zq")[2]
        return min((stop for stop in self.stops if stop in after), key=after.find, default=None)

    def _boundaries(self) -> Iterator[Boundary]:
        delta = DeltaRenderer(self.template, self.can, self.stops)
        for thought in Thought:
            for name, history, new in _cases(self.can, thought is Thought.WITH):
                judged = self._judge(delta, history, new, thought)
                beside = any(message.get("tool_calls") and message["content"] for message in history)
                if judged is not None:
                    yield Boundary(name, new[0]["role"], thought, *judged, beside=beside)

    def _judge(
        self, delta: DeltaRenderer, history: list[Message], new: list[Message], thought: Thought
    ) -> tuple[Verdict, str] | None:
        try:
            tail = delta.text(history[-1].get("tool_calls", ()), new)
            truth = self.template.render([*history, *new], self.tools)
            prompt = self.template.render(history[:-1], self.tools)
            completion = self._completion(prompt, history, thought, tail)
        except TemplateError as error:
            return Verdict.REFUSED, str(error)[-80:]
        if completion is None:
            return None
        tail_ids, truth_ids = self.codec.encode(tail), self.codec.encode(truth)
        if truth_ids[len(truth_ids) - len(tail_ids) :] != tail_ids:
            # The new messages are there, but other text follows: the template moved the model's text.
            verdict = Verdict.REWRITTEN if tail in truth else Verdict.DELTA_DIFFERS
            return verdict, f"{tail[:40]!r} against {truth[len(truth) - len(tail) :][:40]!r}"
        for stop in dict.fromkeys((*self.stops, *self.closers)):
            if tail.startswith(stop) and completion.endswith(self.closers if stop in self.closers else stop):
                tail, tail_ids = tail[len(stop) :], tail_ids[1:]
                break
        if self.codec.encode(prompt) + self.codec.encode(completion) + tail_ids == truth_ids:
            return Verdict.EXACT, ""
        return _difference(prompt + completion + tail, truth)

    def _completion(self, prompt: str, history: list[Message], thought: Thought, tail: str) -> str | None:
        """Return the model's text for the last turn: the template's own text through the stop token. None if
        this kind of turn cannot exist: the format has no reasoning tags, or the generation prompt opens the block."""
        written = self.template.render(history, self.tools, generation_prompt=False)
        body = written[common(prompt, written) :]
        stop = re.search("|".join(map(re.escape, self.stops)), body) if self.stops else None
        leading = next((stop for stop in self.stops if tail.startswith(stop)), "")
        body, opened = body[: stop.end()] if stop else body + leading, self._opens(prompt)
        if self.tags is None:
            return body if thought is Thought.WITHOUT or (thought is Thought.WITH and self.can.reasoning) else None
        block = re.match(rf"\s*{re.escape(self.tags.open)}\s*{re.escape(self.tags.close)}\s*", body)
        if thought is Thought.WITHOUT:
            return None if opened else body[block.end() :] if block else body
        if thought is Thought.EMPTY:
            return body if block or opened else None
        if self.can.reasoning:
            return body
        return f"{'' if opened else self.tags.open}zqReason0zq{self.tags.close}\n\n{body}"


def _difference(grown: str, truth: str) -> tuple[Verdict, str]:
    if grown == truth:
        return Verdict.MERGES, ""
    if lost := sorted({r for r in re.findall(r"zqReason\dzq", grown) if r not in truth}):
        return Verdict.REASONING_DROPPED, f"of {len(lost)} earlier turns" if len(lost) > 1 else ""
    at = common(grown, truth)
    return Verdict.REWRITTEN, f"{grown[max(0, at - 8) : at + 22]!r} becomes {truth[max(0, at - 8) : at + 22]!r}"


def _cases(can: Capabilities, reasoning: bool) -> Iterator[tuple[str, list[Message], list[Message]]]:
    """Yield (name, history that ends with a model turn, new messages) for every kind of boundary."""
    start: list[Message] = [{"role": "system", "content": "zqSyszq"}] if can.system else []
    start.append(user(1))
    answer = assistant(4, reasoning=reasoning)
    if can.tool_messages:
        numbers = [1, 2] if can.parallel_calls else [1]
        call = assistant(1, reasoning=reasoning, calls=numbers, content=False)
        text_call = assistant(1, reasoning=reasoning, calls=numbers)
        results = [result(number) for number in numbers]
        again = assistant(3, reasoning=reasoning, calls=[3], content=False)
        yield "call, then tool", [*start, call], results
        yield "text and call, then tool", [*start, text_call], results
        yield "second call, then tool", [*start, call, *results, again], [result(3)]
        yield "later call, then tool", [*start, assistant(5, reasoning=reasoning), user(3), call], results
        yield "tools and answer, then user", [*start, call, *results, answer], [user(2)]
        yield "text, tools, answer, then user", [*start, text_call, *results, answer], [user(2)]
    first, second = assistant(1, reasoning=reasoning), assistant(2, reasoning=reasoning)
    yield "answer, then user", [*start, first], [user(2)]
    yield "two answers, then user", [*start, first, user(3), second], [user(2)]


def _behind_user(text: str) -> str:
    return text.rpartition("zqUser1zq")[2] if "zqUser1zq" in text else ""


def common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common prefix of two texts, or of two sequences of ids."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
