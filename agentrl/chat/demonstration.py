"""A conversation that shows how it is done, as a `Sample` that a supervised loss can train on.

1. The assistant's turns, end token included, have loss mask 1; everything else has 0.
2. What the assistant writes is taken from the template's own rendering, so a model that learns from it writes what
   the template (and the tool-call parser) expects. Between the turns stands what a rollout would show.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.chat.chat import Chat
from agentrl.chat.conversation import Conversation, Shown
from agentrl.chat.messages import ToolSchema, normalise_messages, normalise_tools
from agentrl.errors import TemplateError
from agentrl.sample import Message, Sample, Status


def to_sample(
    chat: Chat, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema] | None = None, *, index: int = 0
) -> Sample:
    """The conversation as a completed sample with reward 0 and log-probs 0.

    Args:
        chat: renders it.
        messages: a prompt, then assistant messages with what they were shown in between; the last is the assistant's.
        tools: schemas of the tools that the prompt offers.
        index: the sample's `index` and `group_index`.

    Raises:
        TemplateError: no assistant message, one that is not last is missing its answer, or the template writes an
            assistant's turn in another way than it asks for one, or would split the demonstration.
    """
    conversation = normalise_messages(messages)
    turns = [at for at, message in enumerate(conversation) if message["role"] == "assistant"]
    if not turns or turns[-1] != len(conversation) - 1:
        roles = " ".join(message["role"] for message in conversation) or "none"
        raise TemplateError(f"a demonstration must end with an assistant message, got the roles: {roles}")
    sample = Sample(index=index, group_index=index, prompt=conversation[: turns[0]], reward=0.0)
    grown = Conversation(chat, sample, conversation[: turns[0]], tools)
    for at, following in zip(turns, [*turns[1:], None], strict=True):
        text = assistant_text(chat, conversation, at, tools)
        ids = [*chat.encode(text), chat.stop_token_ids[0]]
        grown.sampled(ids, [0.0] * len(ids), "0", text=text)
        if following is not None and grown.show(conversation[at + 1 : following]) is Shown.SPLIT:
            raise TemplateError(
                f"the chat template rewrites the history before assistant message {following}, and --history-policy is "
                "'split'; a demonstration is one sample: choose 'keep'"
            )
    sample.status = Status.COMPLETED
    return sample


def assistant_text(chat: Chat, messages: Sequence[Message], at: int, tools: Sequence[ToolSchema] | None = None) -> str:
    """What the model writes for the assistant message `at`, without the end token.

    Raises:
        TemplateError: the template does not render the turn as a continuation of its own generation prompt.
    """
    schemas = normalise_tools(tools) or None
    before = chat.template.render(messages[:at], schemas, generation_prompt=True)
    after = chat.template.render(messages[: at + 1], schemas, generation_prompt=False)
    end = chat.decode([chat.stop_token_ids[0]])
    if not after.startswith(before) or end not in after[len(before) :]:
        raise TemplateError(
            f"the chat template does not render assistant message {at} as a continuation of its own generation "
            "prompt; set the template's arguments so that both agree (for example enable_thinking)"
        )
    return after[len(before) :].rpartition(end)[0]
