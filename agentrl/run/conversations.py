"""Whole conversations of the prompt data as samples to learn from."""

import sys
from collections.abc import Mapping
from typing import Any

from agentrl.chat import Chat
from agentrl.chat.demonstration import to_sample
from agentrl.config import RunSettings
from agentrl.config.model_info import read_model_info
from agentrl.data.prompts import open_prompts
from agentrl.errors import ContextOverflow, DataError, MediaError, TemplateError
from agentrl.media import Image
from agentrl.sample import Sample


def demonstrated(
    chat: Chat,
    settings: RunSettings,
    messages: Any,
    tools: Any,
    where: str,
    index: int = 0,
    images: Mapping[str, Image] | None = None,
) -> Sample:
    """The sample of one row; it may be longer than the context. Raises DataError: the template cannot write it as a run
    would show it; `where` is the row's file and line."""
    assert settings.data.sft_turns is not None
    try:
        sample = to_sample(chat, messages, tools, index=index, turns=settings.data.sft_turns, images=images)
    except (TemplateError, MediaError, ContextOverflow) as error:
        raise DataError(f"{where}: {error}") from error
    sample.rollout_log_probs = None  # nobody sampled it
    return sample


def longest(settings: RunSettings) -> int:
    """Most tokens of a conversation."""
    model = read_model_info(settings.train.hf_checkpoint)
    known = [settings.rollout.rollout_max_context_len, model.context_length if model else None]
    return min(filter(None, known), default=sys.maxsize)


def check_conversations(settings: RunSettings, chat: Chat) -> None:
    """Read the rows as the settings ask (`prompt_data_check`), and write out the first. Raises DataError: there are
    none, or one is malformed."""
    data = open_prompts(settings.data)
    if data is None:
        raise DataError("no conversations to learn from; give --prompt-data FILE.jsonl")
    row = data[0]
    demonstrated(chat, settings, row.prompt, row.tools, data.where(0), images=row.images)
