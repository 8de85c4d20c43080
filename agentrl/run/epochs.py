"""How many rollouts passes over the prompts are."""

from agentrl.config import RunSettings
from agentrl.data.prompts import open_prompts
from agentrl.errors import DataError


def whole_epochs(settings: RunSettings) -> RunSettings:
    """The settings with as many rollouts as `num_epoch` passes have whole batches, if no number of rollouts was given.

    Conversations (`sft_turns`) are learned in one pass where nothing else is said. With both numbers given, as without
    a file of prompts, the run ends with whichever comes first.

    Raises:
        DataError: the data cannot be read, or does not fill a batch.
    """
    size, epochs = settings.rollout.rollout_batch_size, settings.data.num_epoch
    counted = "num_rollout" in settings.given()
    if epochs is None and settings.data.sft_turns is not None and not counted:
        epochs = 1
    if epochs is None or settings.data.data_source_path is not None:
        return settings
    data = open_prompts(settings.data.model_copy(update={"prompt_data_check": "lazy"}))
    if data is None:
        return settings
    if (drawn := epochs * len(data)) < size:
        raise DataError(
            f"--prompt-data {settings.data.prompt_data} has {len(data)} rows, and --num-epoch {epochs} does not fill one "
            f"batch of --rollout-batch-size {size}; use at most {drawn}, or more epochs"
        )
    return settings if counted else settings.replace(num_epoch=epochs, num_rollout=drawn // size)
