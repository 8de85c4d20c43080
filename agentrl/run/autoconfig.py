"""Derived settings: the device, the threads of a trainer process, and the number of rollouts from `num_epoch`."""

import os

from agentrl.config import RunSettings
from agentrl.data.prompts import open_prompts
from agentrl.errors import DataError, SettingsError
from agentrl.run.resuming import begun, changed


def resolve_device(settings: RunSettings) -> RunSettings:
    """Replace `--device auto` with this machine's device. Raises SettingsError: CUDA is required and missing."""
    import torch

    wanted, available = settings.cluster.device, torch.cuda.is_available()
    if wanted == "cuda" and not available and settings.cluster.ray_address is None:
        raise SettingsError("--device cuda: this machine has no usable CUDA device; pass --device cpu")
    return settings.replace(device="cuda" if available else "cpu") if wanted == "auto" else settings


def resolve_threads(settings: RunSettings) -> RunSettings:
    """Set the threads of a trainer process that Ray starts here: its share of the cores. Engines share too if they
    generate during training. Not with `--backend local` (torch takes all cores) or a joined cluster (cores unknown)."""
    cluster = settings.cluster
    if settings.train.train_threads or cluster.backend == "local" or cluster.ray_address or cluster.device != "cpu":
        return settings
    beside = cluster.num_engines if settings.rollout.max_staleness else 0
    processes = cluster.world_size + cluster.critic_world_size + beside
    return settings.replace(train_threads=max(1, len(os.sched_getaffinity(0)) // processes))


def whole_epochs(settings: RunSettings, purpose: str = "train") -> RunSettings:
    """Return the settings with `num_rollout` set to the batches in `num_epoch` passes, unless it was given. Only
    `agentrl rollout` has a last batch that is not full. If neither was given, `num_epoch` is 1 for conversations
    (`sft_turns`). If both were given, or there is no prompt file, the run ends with whichever comes first. Raises
    DataError: the data cannot be read, or does not fill a batch. SettingsError: the earlier batches had another size."""
    size, epochs = settings.rollout.rollout_batch_size, settings.data.num_epoch
    counted = "num_rollout" in settings.given()
    if epochs is None and settings.data.sft_turns is not None and not counted:
        epochs = 1
    lazily = settings.data.model_copy(update={"prompt_data_check": "lazy"})
    if epochs is None or settings.data.data_source_path is not None or (data := open_prompts(lazily)) is None:
        return settings
    if (drawn := epochs * len(data)) < size and purpose == "train":
        raise DataError(
            f"--prompt-data {settings.data.prompt_data} has {len(data)} rows, and --num-epoch {epochs} does not fill one "
            f"batch of --rollout-batch-size {size}; use at most {drawn}, or more epochs"
        )
    if counted:
        return settings
    differs = changed(settings, only={"rollout_batch_size"}) if purpose == "train" else []
    if differs and begun(settings):
        said = "the number of rollouts does not follow from --num-epoch any more"
        raise SettingsError(f"{differs[0]}: {said}; give --num-rollout, too")
    return settings.replace(num_epoch=epochs, num_rollout=drawn // size if purpose == "train" else -(-drawn // size))
