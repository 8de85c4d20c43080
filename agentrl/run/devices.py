"""Which device models run on, and how many of the machine's cores train."""

import os

from agentrl.config import RunSettings
from agentrl.errors import SettingsError


def resolve_device(settings: RunSettings) -> RunSettings:
    """Replace `--device auto` by what this machine, or the joined cluster, has.

    Raises:
        SettingsError: CUDA was asked for and is not there.
    """
    import torch

    wanted = settings.cluster.device
    joined = settings.cluster.ray_address is not None
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available and not joined:
        raise SettingsError("--device cuda: this machine has no usable CUDA device; pass --device cpu")
    if wanted == "auto":
        return settings.replace(device="cuda" if available else "cpu")
    return settings


def resolve_threads(settings: RunSettings) -> RunSettings:
    """Give trainer processes that Ray starts here all cores while the engines wait for them, else their share.

    Left alone Ray would give each one thread, and torch in one process takes all cores anyway. Trainers of a joined
    cluster are on machines that are not known yet.
    """
    cluster = settings.cluster
    if settings.train.train_threads or cluster.backend == "local" or cluster.ray_address or cluster.device != "cpu":
        return settings
    beside = cluster.num_engines if settings.rollout.max_staleness else 0
    cores = len(os.sched_getaffinity(0))
    trainers = cluster.world_size + cluster.critic_world_size
    return settings.replace(train_threads=max(1, cores // (trainers + beside)))
