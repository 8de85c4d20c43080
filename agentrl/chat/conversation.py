"""`Conversation`: a growing trajectory, as ids, as a `Sample` and as messages.

1. Ids that the model sampled are never decoded and encoded again.
2. If the template would rewrite history under policy `split`, `append_messages` closes the sample and continues in a
   sibling with the same `rollout_id`. `earlier` holds the closed samples.
3. `restart` also begins a sibling. Its prompt is the given messages instead of the conversation.
4. A client that sends its whole conversation each time is recognised by content (`continued`).
5. A conversation is not safe for concurrent tasks."""

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from agentrl.chat.chat import Chat
from agentrl.chat.messages import ParsedTurn, ToolSchema, normalise_messages, whole_text
from agentrl.chat.session import ChatSession
from agentrl.errors import ContextOverflow
from agentrl.sample import Message, Origin, Sample, SpecInfo, Status, VersionSpan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class AppendResult(Enum):
    """Outcome of appending messages."""

    FITS = "fits"  # the messages were appended, and the model has room for a turn
    SPLIT = "split"  # the sample was closed, and a sibling begins with the whole conversation as its prompt
    OUT_OF_CONTEXT = "out_of_context"  # the messages leave no room for a turn; the sample is unchanged


def _too_long(tokens: str, most: int) -> ContextOverflow:
    remedy = "shorten the data, or raise --rollout-max-prompt-len or --rollout-max-context-len"
    return ContextOverflow(f"the prompt has {tokens} tokens, at most {most} fit; {remedy}", kind="prompt_too_long")


class Conversation:
    """A trajectory in flight."""

    def __init__(
        self,
        chat: Chat,
        sample: Sample,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSchema] | None = None,
        *,
        context_length: int = sys.maxsize,
        prompt_limit: int | None = None,
    ) -> None:
        """Begin `sample` with the prompt that `messages` render to. Raises ContextOverflow: no room for an answer; the
        sample is unchanged. TemplateError: the template cannot render the messages. MediaError: an image is refused.
        `prompt_limit`: maximum tokens of the prompt, if below the limit that the context sets."""
        messages, images = chat.take_images(messages, sample.images)
        most = min(prompt_limit or context_length, context_length - 2)
        if (least := chat.least_tokens(messages)) > most:
            raise _too_long(f"at least {least}", most)
        self._chat, self._tools, self._session = chat, tools, ChatSession(chat, messages, tools)
        self.sample = sample  # the sample that grows
        self.context_length = context_length  # maximum tokens of prompt and response together, plus 1
        self.earlier: list[Sample] = []  # the samples that `sample` was split from, oldest first
        self.messages: list[Message] = []  # the whole conversation as it was given and parsed
        self.turns = 0  # number of turns of the model
        self.length = len(self._session.prompt_ids)  # tokens, including new messages that turned out not to fit
        self._told: dict[int, str] = {}
        if self.length > most:
            raise _too_long(str(self.length), most)
        sample.images = {**sample.images, **images}
        self._set_prompt(self._session.prompt_ids)
        self.remember(messages)

    @property
    def room(self) -> int:
        """Maximum tokens of the next turn."""
        return self.context_length - self.length - 1

    def append_model_turn(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float],
        version: str | Sequence[VersionSpan] | None,
        *,
        text: str,
        kept: Sequence[Sequence[int]] | None = None,
        routed: "NDArray[np.int16] | None" = None,
    ) -> ParsedTurn:
        """Append a model turn, as the engine returned it; the arguments are those of `Sample.append_model`. Raises
        SampleError: the arguments disagree. TemplateError: `append_messages` was not called since the last turn."""
        self.sample.append_model(ids, log_probs, version, text=text, turn=self.turns + 1, kept=kept, routed=routed)
        self.turns += 1
        self.length += len(ids)
        parsed = self._session.append_model_turn(ids)
        self.messages.append(parsed.to_message())
        return parsed

    def append_messages(self, messages: Sequence[Mapping[str, Any]]) -> AppendResult:
        """Answer the last model turn with new messages. Messages that are too long to fit are not tokenized. Raises
        TemplateError: see `ChatSession.extend`. MediaError: an image is refused."""
        messages = self._taken(messages)
        if self._chat.least_tokens(messages) > self.room:
            self.remember(messages)
            return AppendResult.OUT_OF_CONTEXT
        delta = self._session.extend(messages)
        self.remember(messages)
        restart = delta.restart
        self.length = self.length + len(delta.close) + len(delta.env) if restart is None else len(restart)
        if self.room < 1:
            return AppendResult.OUT_OF_CONTEXT
        if restart is not None:
            self._split(restart, "done")
            return AppendResult.SPLIT
        for ids, origin in ((delta.close, Origin.CLOSE), (delta.env, Origin.ENV)):
            spans = self._chat.image_spans(ids, delta.new) if origin is Origin.ENV else ()
            text = self._chat.decode(ids)
            self.sample.append_observation(ids, text=text, turn=self.turns, origin=origin, spans=spans)
        return AppendResult.FITS

    def restart(self, messages: Sequence[Mapping[str, Any]]) -> AppendResult:
        """Close the sample, and begin a sibling with only `messages` as its prompt, for example a summary of the
        conversation. Raises TemplateError: the template cannot render the messages. MediaError: an image is refused."""
        messages = self._taken(messages)
        if self._chat.least_tokens(messages) > self.context_length - 2:
            return AppendResult.OUT_OF_CONTEXT
        session = ChatSession(self._chat, messages, self._tools)
        if len(session.prompt_ids) > self.context_length - 2:
            return AppendResult.OUT_OF_CONTEXT
        self.sample.metadata["messages"] = self.messages
        self._session, self.length, self.messages, self._told = session, len(session.prompt_ids), [], {}
        self._split(session.prompt_ids, "restart")
        self.remember(messages)
        return AppendResult.SPLIT

    def _taken(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return messages with references in place of images. Adds the images to the sample."""
        messages, images = self._chat.take_images(messages, self.sample.images)
        self.sample.images = {**self.sample.images, **images}
        return messages

    def remember(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Add messages to the record `messages` only, for example messages that the model is never shown."""
        self.messages.extend(whole_text(message) for message in self._taken(messages))

    def _split(self, prompt: list[int], reason: str) -> None:
        done = self.sample
        done.stop(reason)
        done.rollout_id = done.index if done.rollout_id is None else done.rollout_id
        self.earlier.append(done)
        rest = {k: copy.deepcopy(v) for k, v in done.metadata.items() if k != "counters"}
        self.sample = replace(
            done, metadata=rest, status=Status.PENDING, stop_reason="", spec_info=SpecInfo(), non_generation_time=0.0
        )
        self._set_prompt(prompt)

    def _set_prompt(self, ids: list[int]) -> None:
        self.sample.set_prompt_tokens(ids, self._chat.image_spans(ids, self._session.messages))

    def record_shown_text(self, text: str) -> None:
        """Record the text that the client got for the last turn. `continued` accepts this text in place of the turn."""
        self._told[len(self.messages) - 1] = text

    def continued(self, messages: Sequence[Message], *, same_list: bool = False) -> list[Message] | None:
        """Return the new part of `messages`, or None if `messages` does not begin with this conversation.

        Messages are compared in their normal form. Each model turn must appear, as the text of `record_shown_text` or
        in its parsed form. The new part has no model turns, so only the conversation with the longest history matches.
        `same_list`: `messages` is the list object with which the conversation began. The client maintains this list: it
        may have the model's turns in any form, or lack them."""
        known, told = self.messages, self._told
        if same_list:
            messages, known = _without_assistant(messages), _without_assistant(known)
            told = {}
        elif len(known) - 1 not in told:
            return None  # the client does not have the last turn yet
        begin, new = normalise_messages(messages[: len(known)]), list(messages[len(known) :])
        if len(begin) < len(known) or (not same_list and len(_without_assistant(new)) < len(new)):
            return None
        pairs = zip(begin, normalise_messages(known), strict=True)
        same = all(given == own or _says(given, own, told.get(at)) for at, (given, own) in enumerate(pairs))
        return new if same else None


def _says(given: Message, turn: Message, told: str | None) -> bool:
    """Return true if `given` is the model's turn, with the text that the client got for it."""
    calls = given.get("tool_calls")
    return given["role"] == "assistant" and given["content"] == told and calls in (None, turn.get("tool_calls"))


def _without_assistant(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message.get("role") != "assistant"]
