"""Settings that are derived: the device, the cores of a trainer, and the number of rollouts that the data makes."""

import os

from agentrl.config import RunSettings
from agentrl.data.prompts import open_prompts
from agentrl.errors import DataError, SettingsError


def resolve_device(settings: RunSettings) -> RunSettings:
    """Replace `--device auto` by what this machine or the joined cluster has. Raises SettingsError: CUDA is missing."""
    import torch

    wanted, available = settings.cluster.device, torch.cuda.is_available()
    if wanted == "cuda" and not available and settings.cluster.ray_address is None:
        raise SettingsError("--device cuda: this machine has no usable CUDA device; pass --device cpu")
    return settings.replace(device="cuda" if available else "cpu") if wanted == "auto" else settings


def resolve_threads(settings: RunSettings) -> RunSettings:
    """Give trainer processes that Ray starts here all cores while the engines wait for them, else their share. Ray would
    give each one thread. torch in one process takes all cores. The machines of a joined cluster are not known yet."""
    cluster = settings.cluster
    if settings.train.train_threads or cluster.backend == "local" or cluster.ray_address or cluster.device != "cpu":
        return settings
    beside = cluster.num_engines if settings.rollout.max_staleness else 0
    processes = cluster.world_size + cluster.critic_world_size + beside
    return settings.replace(train_threads=max(1, len(os.sched_getaffinity(0)) // processes))


def whole_epochs(settings: RunSettings) -> RunSettings:
    """The settings with as many rollouts as `num_epoch` passes have whole batches, if no number of rollouts was given.
    Conversations (`sft_turns`) are learned in one pass where nothing else is said. With both numbers given, as without
    a file of prompts, the run ends with whichever comes first. Raises DataError: the data cannot be read, or does not
    fill a batch."""
    size, epochs = settings.rollout.rollout_batch_size, settings.data.num_epoch
    counted = "num_rollout" in settings.given()
    if epochs is None and settings.data.sft_turns is not None and not counted:
        epochs = 1
    lazily = settings.data.model_copy(update={"prompt_data_check": "lazy"})
    if epochs is None or settings.data.data_source_path is not None or (data := open_prompts(lazily)) is None:
        return settings
    if (drawn := epochs * len(data)) < size:
        raise DataError(
            f"--prompt-data {settings.data.prompt_data} has {len(data)} rows, and --num-epoch {epochs} does not fill one "
            f"batch of --rollout-batch-size {size}; use at most {drawn}, or more epochs"
        )
    return settings if counted else settings.replace(num_epoch=epochs, num_rollout=drawn // size)
