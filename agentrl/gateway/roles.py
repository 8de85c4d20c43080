"""Roles that a chat template cannot show, folded into roles that it can show.

1. Agents send several system and developer messages first, and more of them later. Many templates raise for these, or
   silently drop their text.
2. `Roles.probe` renders a few conversations once and takes the first fold under which the template shows every text, in
   order. No text is lost: text that cannot be shown in one role is shown in another.
3. A fold joins no messages across an assistant's message, so a longer history extends the fold of a shorter one."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, product
from typing import Any, Self

from agentrl.chat import Chat
from agentrl.errors import TemplateError
from agentrl.sample import Message

_INSTRUCTIONS = ("system", "developer")
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "zqxLook", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class Roles:
    """Rules by which messages are folded.

    Attributes:
        first: role of the instructions at the beginning: `system`, or `user` if the template has no system message.
        later: role of later instructions.
        join_users: user messages in a row become one.
        join_results: a user message after a tool's result is appended to the result.
        retold: turns that the model did not write and that get another form. Calls become text (`all`, those `beside`
            text, `several` in one message); two assistant messages in a row become one (`twice`).
        lost: pairs of successive roles that the template cannot show under any fold."""

    first: str = "system"
    later: str = "system"
    join_users: bool = False
    join_results: bool = False
    retold: frozenset[str] = frozenset()
    lost: frozenset[tuple[str, str]] = frozenset()

    @classmethod
    def probe(cls, chat: Chat) -> Self:
        """Return the fold under which the template shows the most pairs of roles, with the fewest changes."""
        options = product(("system", "user"), ("system", "user"), (False, True), (False, True))
        folds = sorted((cls(*option) for option in options), key=lambda fold: len(fold.report))
        best, least = folds[0], frozenset(_SHAPES)
        for fold in folds:
            lost = frozenset(pair for pair, shape in _SHAPES.items() if not fold._shows(chat, shape))
            if len(lost) < len(least):
                best, least = fold, lost
            if not lost:
                break
        retold = frozenset(kind for kind, shape in _TURNS.items() if not best._shows(chat, shape))
        return replace(best, retold=retold, lost=least)

    def _shows(self, chat: Chat, shape: str) -> bool:
        """Return true if the template renders every text of a conversation once, in order."""
        messages = self.fold(_conversation(shape))
        try:
            text = chat.template.render(messages, [_TOOL], generation_prompt=True)
        except TemplateError:
            return False
        past = -1
        for message in messages:  # a call's text may stand on either side of its arguments
            marks = re.findall(r"zqx\d+zqx", str(message))
            places = [text.find(mark) for mark in marks]
            if min(places) <= past or any(text.count(mark) != 1 for mark in marks):
                return False
            past = max(places)
        return True

    @property
    def report(self) -> str:
        """One line for each change that the fold makes."""
        said = [
            (self.first != "system", "instructions are shown as part of the first user message"),
            (self.later != "system", "instructions behind the first message are shown as user messages"),
            (self.join_users, "user messages in a row are shown as one"),
            (self.join_results, "user messages behind a tool's result are shown at the result's end"),
            (bool(self.retold), f"turns of others are shown in another form: {', '.join(sorted(self.retold))}"),
        ]
        lost = (f"cannot be shown: {_behind(pair)}" for pair in sorted(self.lost))
        return "\n".join([*(text for holds, text in said if holds), *lost])

    def fold(self, messages: Sequence[Message]) -> list[Message]:
        """Return new messages in roles that the template shows. Raises TemplateError: no fold shows them."""
        roles = ["system" if message["role"] in _INSTRUCTIONS else message["role"] for message in messages]
        if self.lost and (wrong := next((p for p in pairwise(["", *roles]) if p in self.lost), None)):
            raise TemplateError(f"messages: the chat template cannot show {_behind(wrong)}")
        folded = list[Message]()
        if set(roles) == {"system"}:
            return [{"role": "user", "content": _joined(*(message["content"] for message in messages))}]
        for message in self._instructed(messages):
            last = folded[-1]["role"] if folded else ""
            joins = (self.join_users and last == "user") or (self.join_results and last == "tool")
            if joins and message["role"] == "user":
                folded[-1] = {**folded[-1], "content": _joined(folded[-1]["content"], message["content"])}
            else:
                folded.append(message)
        return folded

    def show(self, messages: Sequence[Message]) -> list[Message]:
        """Return a folded history with the kinds of turns in `retold` in a form that the template shows."""
        if not self.retold:
            return list(messages)
        found, told = list[Message](), False
        for message in messages:
            calls = message.get("tool_calls", ())
            if message["role"] == "assistant":
                holds = {"all": bool(calls), "beside": bool(calls and message["content"]), "several": len(calls) > 1}
                told = any(holds.get(kind) for kind in self.retold)
                texts = [json.dumps(call["function"], ensure_ascii=False, separators=(",", ":")) for call in calls]
                text = "\n".join(filter(None, [message["content"], *texts]))
                message = {"role": "assistant", "content": text} if told else message
            elif message["role"] == "tool" and told:
                message = {"role": "user", "content": message["content"]}
            again = found and found[-1]["role"] == message["role"] == "assistant" and "tool_calls" not in found[-1]
            if again and "twice" in self.retold:
                found[-1] = {**message, "content": _joined(found[-1]["content"], message["content"])}
            else:
                found.append(message)
        return replace(self, lost=frozenset()).fold(found)

    def _instructed(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Yield the messages: the first instructions as one message, later instructions in the role `later`."""
        begun = False
        for instructions, run in groupby(messages, key=lambda message: message["role"] in _INSTRUCTIONS):
            if not instructions:
                yield from run
            elif begun:
                yield from ({**message, "role": self.later} for message in run)
            else:
                told = [*run]
                joined = {"role": self.first, "content": _joined(*(message["content"] for message in told))}
                yield told[0] if told[0] == joined else joined  # the same object has a known digest
            begun = True


def _joined(*contents: Any) -> Any:
    """Return contents joined to one: a text, or a list of parts if one of them is a list."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    lists = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents]
    return [*lists[0], *(part for parts in lists[1:] for part in ({"type": "text", "text": "\n\n"}, *parts))]


def _behind(pair: tuple[str, str]) -> str:
    return f"a message of role {pair[1]} " + (f"after a message of role {pair[0]}" if pair[0] else "at the beginning")


_SHAPES = {
    ("", "system"): "su",
    ("user", "user"): "suu",
    ("assistant", "tool"): "suct",
    ("tool", "user"): "suctu",
    ("user", "system"): "sus",
    ("assistant", "system"): "uasu",
    ("tool", "system"): "sucts",
}
"""Pairs of roles, each with a conversation that has the pair. Letters are the first letters of roles (c: a call)."""
_TURNS = {"all": "suct", "beside": "subtbtau", "several": "sudtt", "twice": "uaau"}
"""Kinds of `retold`, each with a conversation that has the kind (b: a call beside text, d: two calls, a: an answer)."""


def _call(mark: str, number: int) -> dict[str, Any]:
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": "zqxLook", "arguments": {"at": mark}}}


def _conversation(shape: str) -> list[Message]:
    names, calls, results = {"s": "system", "u": "user", "t": "tool"}, 0, 0
    found = []
    for number, letter in enumerate(shape):
        message: Message = {"role": names.get(letter, "assistant"), "content": f"zqx{number}zqx"}
        if letter in "cbd":
            message["content"] *= letter == "b"
            made = range(calls, calls := calls + 1 + (letter == "d"))
            message["tool_calls"] = [_call(f"zqx{number}{at}zqx", at) for at in made]
        if letter == "t":
            message |= {"tool_call_id": f"call{results:05d}", "name": "zqxLook"}
            results += 1
        found.append(message)
    return found
