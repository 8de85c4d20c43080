"""A conversation as a `Sample` for a supervised loss. The assistant's turns have loss mask 1, end token included. A
message's own `loss` (or `train`, `weight`, `step_loss_mask`) can exclude a turn. The template renders all text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agentrl.chat.chat import Chat
from agentrl.chat.conversation import AppendResult, Conversation
from agentrl.chat.messages import ToolSchema, normalise_messages, normalise_tools
from agentrl.errors import TemplateError
from agentrl.media import Image
from agentrl.sample import Message, Sample

Turns = Literal["all", "last"]  # the assistant's turns that are learned
_MARKS = ("loss", "train", "weight", "step_loss_mask")
"""Keys by which data sets say if a message is learned: ours, axolotl's, OpenAI's, slime's."""


def to_sample(
    chat: Chat,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[ToolSchema] | None = None,
    *,
    index: int = 0,
    turns: Turns = "all",
    images: Mapping[str, Image] | None = None,
) -> Sample:
    """Return the conversation as a completed sample with reward 0 and log-probs 0. Raises MediaError: an image of
    `messages` is refused. TemplateError: see `learned` and `assistant_turn`; or an assistant message before the last
    has no answer; or the template would split the demonstration.

    Args:
        messages: a prompt, then assistant messages with observations in between. The last message is the assistant's.
        tools: schemas of the tools that the prompt offers.
        index: the sample's `index` and `group_index`.
        turns: the assistant's turns that are learned if no message of the conversation has a mark of its own.
        images: images that `messages` refer to, by hash."""
    learns = learned(messages, turns)
    plain = [{key: value for key, value in message.items() if key not in _MARKS} for message in messages]
    taken, new = chat.take_images(plain, images or {})
    conversation, places = normalise_messages(taken), list(learns)
    known = {**(images or {}), **new}
    sample = Sample(index=index, group_index=index, prompt=conversation[: places[0]], reward=0.0, images=known)
    grown = Conversation(chat, sample, conversation[: places[0]], tools)
    for at, following in zip(places, [*places[1:], None], strict=True):
        text, end = assistant_turn(chat, conversation, at, tools)
        ids = [*chat.encode_turn(text), *chat.encode(end)]
        grown.append_model_turn(ids, [0.0] * len(ids), "0", text=text)
        if not learns[at] and sample.loss_mask is not None:
            sample.loss_mask[-len(ids) :] = [0] * len(ids)
        if following is not None and grown.append_messages(conversation[at + 1 : following]) is AppendResult.SPLIT:
            why = f"the chat template rewrites the history before assistant message {following}"
            raise TemplateError(f"{why}, and --template-rewrite-policy is 'split'; choose 'keep' for demonstrations")
    sample.stop("done")
    return sample


def learned(messages: Sequence[Mapping[str, Any]], turns: Turns = "all") -> dict[int, bool]:
    """Return, by index of assistant message, true if the message is learned. Raises TemplateError: the last message is
    not the assistant's, no message is learned, marks contradict each other, or a mark is not a boolean."""
    roles = [message.get("role") for message in messages]
    places = [at for at, role in enumerate(roles) if role == "assistant"]
    if not places or places[-1] != len(roles) - 1:
        shown = " ".join(map(str, roles)) or "none"
        raise TemplateError(f"a demonstration must end with an assistant message, got the roles: {shown}")
    marks = {at: _mark(messages[at], at) for at in places}
    # If some messages have a mark, the messages without a mark are learned.
    usual = turns == "all" or any(mark is not None for mark in marks.values())
    found = {at: (usual or at == places[-1]) if mark is None else mark for at, mark in marks.items()}
    if not any(found.values()):
        raise TemplateError("no message of the demonstration is learned; mark one of them, or leave it out")
    return found


def _mark(message: Mapping[str, Any], at: int) -> bool | None:
    """Return the message's own mark as a boolean; None if it has no mark."""
    given = {name: message[name] for name in _MARKS if message.get(name) is not None}
    for name, value in given.items():
        if value not in (0, 1):
            raise TemplateError(f"message {at}: {name!r} must be true or false (or 1 or 0), got {value!r:.80}")
    if len(set(map(bool, given.values()))) > 1:
        raise TemplateError(f"message {at}: {' and '.join(map(repr, given))} contradict each other; keep one of them")
    return next((bool(value) for value in given.values()), None)


def assistant_turn(
    chat: Chat, messages: Sequence[Message], at: int, tools: Sequence[ToolSchema] | None = None
) -> tuple[str, str]:
    """Return the model's text for the assistant message `at`, and its end token (which may differ after calls).
    Raises TemplateError: the template does not render the turn as a continuation of its own generation prompt."""
    schemas = normalise_tools(tools) or None
    before = chat.template.render(messages[:at], schemas, generation_prompt=True)
    after = chat.template.render(messages[: at + 1], schemas, generation_prompt=False)
    stop = "|".join(map(re.escape, chat.report.stops))
    ends = list(re.finditer(stop, after[len(before) :])) if stop else []
    if not after.startswith(before) or not ends:
        said = f"the chat template does not render assistant message {at} as a continuation"
        remedy = "set the template's arguments so that both agree (for example enable_thinking)"
        raise TemplateError(f"{said} of its own generation prompt; {remedy}")
    return after[len(before) :][: ends[-1].start()], ends[-1][0]
