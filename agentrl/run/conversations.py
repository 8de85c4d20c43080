"""Whole conversations of the prompt data as samples to learn from."""

from typing import Any

from agentrl.chat import Chat
from agentrl.chat.demonstration import to_sample
from agentrl.config import RunSettings
from agentrl.data.prompts import PromptRow, open_prompts
from agentrl.errors import ContextOverflow, DataError, MediaError, TemplateError, raised_as
from agentrl.sample import Sample


def demonstrated(
    chat: Chat, settings: RunSettings, row: PromptRow | Sample, tools: Any, where: str, index: int = 0
) -> Sample:
    """The sample of one row; it may be longer than the context. Raises DataError: the template cannot write it as a run
    would show it; `where` is the row's file and line."""
    assert settings.data.sft_turns is not None
    messages: Any = row.prompt
    with raised_as(DataError, where, TemplateError, MediaError, ContextOverflow):
        sample = to_sample(chat, messages, tools, index=index, turns=settings.data.sft_turns, images=row.images)
    sample.rollout_log_probs = None  # nobody sampled it
    return sample


def check_conversations(settings: RunSettings, chat: Chat) -> None:
    """Read the rows, and write out the first. Raises DataError: there are none, or one is malformed."""
    if (data := open_prompts(settings.data)) is None:
        raise DataError("no conversations to learn from; give --prompt-data FILE.jsonl")
    demonstrated(chat, settings, data[0], data[0].tools, data.where(0))
