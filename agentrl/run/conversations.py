"""Samples for SFT, made of prompt rows that are whole conversations."""

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
    """Return the sample of one row; it may be longer than the context. `where`: the row's file and line. Raises
    DataError: the template cannot render the row as a rollout would."""
    assert settings.data.sft_turns is not None
    messages: Any = row.prompt
    with raised_as(DataError, where, TemplateError, MediaError, ContextOverflow):
        sample = to_sample(chat, messages, tools, index=index, turns=settings.data.sft_turns, images=row.images)
    sample.rollout_log_probs = None  # no model sampled the tokens
    return sample


def check_conversations(settings: RunSettings, chat: Chat) -> None:
    """Read the prompt data and render its first row. Raises DataError: there is no data, or a row is malformed."""
    if (data := open_prompts(settings.data)) is None:
        raise DataError("no conversations to learn from; give --prompt-data FILE.jsonl")
    demonstrated(chat, settings, data[0], data[0].tools, data.where(0))
