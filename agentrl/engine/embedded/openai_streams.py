"""The OpenAI endpoints' answers as streams.

1. A chat's reasoning and text come as they are written, up to what may turn out to be a tag or a stop string; calls come
   at the end. What was sent is how the whole answer's reasoning and content begin.
2. Log-probs come with the next chunk, those of tokens without text (a tag's, the end's) too.
3. `stream_options.include_usage` adds a last chunk without choices.
"""

import re
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.engine.embedded.generate import raise_for_failed
from agentrl.engine.embedded.openai_answers import usage
from agentrl.engine.embedded.service import Call

if TYPE_CHECKING:
    from agentrl.chat.parsers import TurnParser

Body = dict[str, Any]
_TAG_BEGUN = re.compile(r"(?:<\|(?:open|close)\|>[^<>]{0,99})?<[^<>]{0,99}\Z|<\|(?:open|close)\|>[^<>]{0,99}\Z")
LogProbs = Callable[[Body, int], Body | None]
"""Of an answer's tokens from a number on; None where nobody asked."""


@dataclass
class Sent:
    """What of one choice has been sent: characters of its reasoning and its text, tokens with their log-probs."""

    begun: bool = False
    reasoning: int = 0
    text: int = 0
    tokens: int = 0


Entries = Callable[[int, Body, Sent, bool], Iterator[Body]]
"""New entries of `choices` for an index, from its answer so far and whether that is the whole."""


async def stream(start: Callable[[], Call], head: Body, entries: Entries, *, count: bool) -> AsyncGenerator[Body]:
    """All chunks of a stream; `count`: with the usage at its end."""
    sent: dict[int, Sent] = {}
    with closing(start()) as call:
        async for index in call.progress():
            finish, params = call.jobs[index].finish, call.jobs[index].params
            raise_for_failed(finish)
            answer = call.answer(index)
            if finish is None and not params.no_stop_trim:
                answer["text"] = _held(answer["text"], params.stop)
            for entry in entries(index, answer, sent.setdefault(index, Sent()), finish is not None):
                yield {**head, "choices": [entry]}
        if count:
            yield {**head, "choices": [], **usage([call.answer(index) for index in sorted(sent)])}


def chat_entries(
    index: int,
    answer: Body,
    sent: Sent,
    whole: bool,
    *,
    choice: Callable[[int, Body], Body],
    log_probs: LogProbs,
    read: Callable[[str], tuple[str, str]],
) -> Iterator[Body]:
    """`read`: the reasoning and the content that are sure of an unfinished text."""

    def entry(delta: Body, new: Body | None = None, **more: Any) -> Body:
        sent.tokens += len(new["content"]) if new else 0
        delta = {"reasoning_content": None, **delta}
        return {"index": index, "delta": delta, "logprobs": new, "finish_reason": None, "matched_stop": None, **more}

    if not sent.begun:
        sent.begun = True
        yield entry({"role": "assistant", "content": ""})
    done: Body = choice(index, answer) if whole else {}
    message = done.pop("message", {})
    reasoning, text = (message["reasoning_content"] or "", message["content"]) if whole else read(answer["text"])
    delta: Body = {"reasoning_content": reasoning[sent.reasoning :], "content": text[sent.text :]}
    delta = {name: new for name, new in {**delta, "tool_calls": message.get("tool_calls")}.items() if new}
    sent.reasoning, sent.text = max(sent.reasoning, len(reasoning)), max(sent.text, len(text))
    if delta:
        yield entry(delta, log_probs(answer, sent.tokens))
    if whole:
        yield entry({}, **{**done, "logprobs": log_probs(answer, sent.tokens)})


def text_entries(
    index: int, answer: Body, sent: Sent, whole: bool, *, choice: Callable[[int, Body, int], Body]
) -> Iterator[Body]:
    one = choice(index, answer, sent.tokens)
    text = one["text"][sent.text :]
    sent.text += len(text)
    sent.tokens += len(one["logprobs"]["tokens"]) if one["logprobs"] else 0
    yield {**one, "text": text, **({} if whole else {"finish_reason": None, "matched_stop": None})}


def settled(parser: "TurnParser", text: str) -> tuple[str, str]:
    """How the reasoning and the content of every turn begin that begins with `text`."""
    tags, family = parser.tags, parser.family
    marks = family.begins
    if tags is None and parser.reasoning is not None:  # a function's, which takes any text
        turn = parser.parse(_TAG_BEGUN.sub("", text)) if any(mark in text for mark in family.answers) else None
        return (turn.reasoning or "", turn.content) if turn else ("", "")
    reasoning = ""
    if tags is not None:
        body, opened = text.lstrip(), parser.opens_reasoning
        if any(pair.open.startswith(body) for pair in (tags, tags.other) if pair):
            return "", ""
        tags = tags.of(body)
        if body.startswith(tags.open):
            text, opened = body[len(tags.open) :], True
        if opened:
            thought, closed, text = text.partition(tags.close)
            if not closed:
                ends = [tags.close, *marks, *family.answers]
                return _held(_before(thought, ends), ends).strip(), ""
            reasoning = thought.strip()
    if family.name == "none":
        return reasoning, text.strip()
    sure = _TAG_BEGUN.sub("", _held(_before(text, marks), marks)) if marks else ""
    found = family.parse(sure, ())
    return reasoning, (sure.partition("<")[0] if found.calls or found.broken else found.text).strip()


def _before(text: str, marks: Sequence[str]) -> str:
    return text[: min((at for mark in marks if (at := text.find(mark)) >= 0), default=len(text))]


def _held(text: str, marks: Sequence[str]) -> str:
    """`text` without an end with which one of `marks` may begin."""
    ends = (k for mark in marks for k in range(len(mark) - 1, 0, -1) if text.endswith(mark[:k]))
    return text[: len(text) - max(ends, default=0)]
