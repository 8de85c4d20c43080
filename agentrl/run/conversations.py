"""Whole conversations of the prompt data as samples to learn from."""

import sys
from typing import Any

from agentrl.chat import Chat
from agentrl.chat.demonstration import to_sample
from agentrl.config import RunSettings
from agentrl.config.model_info import read_model_info
from agentrl.data.prompts import open_prompts
from agentrl.errors import ContextOverflow, DataError, TemplateError
from agentrl.sample import Sample


def demonstrated(chat: Chat, settings: RunSettings, messages: Any, tools: Any, where: str, index: int = 0) -> Sample:
    """The sample of one row; it may be longer than the context.

    Raises:
        DataError: the template cannot write it as a run would show it; `where` is the row's file and line.
    """
    assert settings.data.sft_turns is not None
    try:
        sample = to_sample(chat, messages, tools, index=index, turns=settings.data.sft_turns)
    except (TemplateError, ContextOverflow) as error:
        raise DataError(f"{where}: {error}") from error
    sample.rollout_log_probs = None  # nobody sampled it
    return sample


def longest(settings: RunSettings) -> int:
    """Most tokens of a conversation."""
    model = read_model_info(settings.train.hf_checkpoint)
    known = [settings.rollout.rollout_max_context_len, model.context_length if model else None]
    return min(filter(None, known), default=sys.maxsize)


def check_conversations(settings: RunSettings, chat: Chat) -> None:
    """Read the rows as the settings ask (`prompt_data_check`), write out the first, and see that there are enough.

    Raises:
        DataError: there are none, one is malformed, or they do not fill a batch.
    """
    data, size, epochs = open_prompts(settings.data), settings.rollout.rollout_batch_size, settings.data.num_epoch
    if data is None or settings.data.data_source_path is not None:
        raise DataError("conversations to learn from come from --prompt-data FILE; leave --data-source-path out")
    if epochs is not None and epochs * len(data) < size:
        raise DataError(
            f"--prompt-data {settings.data.prompt_data} has {len(data)} conversations, and --num-epoch {epochs} does not fill "
            f"one batch of --rollout-batch-size {size}; use at most {epochs * len(data)}, or more epochs"
        )
    demonstrated(chat, settings, data[0].prompt, data[0].tools, data.where(0))


def whole_epochs(settings: RunSettings) -> RunSettings:
    """The settings with as many steps as the epochs have whole batches, one epoch if neither number was given.

    Raises:
        DataError: the data cannot be read, or does not fill a batch.
    """
    if "num_rollout" in settings.given():
        return settings
    epochs = settings.data.num_epoch or 1
    data = open_prompts(settings.data.model_copy(update={"prompt_data_check": "lazy"}))
    steps = epochs * len(data or ()) // settings.rollout.rollout_batch_size
    return settings.replace(num_epoch=epochs, num_rollout=max(steps, 1))
