"""One rank of the trainer: a train backend, chosen by the settings and joined to the other ranks."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import SystemRandom
from typing import TYPE_CHECKING

from agentrl.config import RunSettings
from agentrl.train.backends import backend_class
from agentrl.train.contracts import Learners, RankInfo
from agentrl.train.hooks import hooks_of

if TYPE_CHECKING:
    from agentrl.train.trainer import TrainBackend

__all__ = ["Learners", "RankInfo", "free_port", "start_backend"]


def start_backend(settings: RunSettings, where: RankInfo, learners: Learners = "all") -> TrainBackend:
    """Build the rank's backend and load the starting weights. Blocks until all ranks have joined."""
    backend = make_backend(settings, learners)
    backend.init(where)
    return backend


def make_backend(settings: RunSettings, learners: Learners = "all") -> TrainBackend:
    """Make the backend that the settings name, without models."""
    return backend_class(settings.train.train_backend)(
        settings.train,
        settings.algorithm,
        rollout_temperature=settings.rollout.rollout_temperature,
        total_steps=settings.rollout.num_rollout * settings.train.num_steps_per_rollout,
        device=settings.cluster.device,
        learners=learners,
        hooks=hooks_of(settings.args),
    )


def free_port() -> int:
    """Return a free TCP port, from a range that systems by default do not use for outgoing connections."""
    while True:
        port = SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
