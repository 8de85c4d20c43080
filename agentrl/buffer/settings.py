"""Settings of what is kept of groups: in the ledger to train on, in the trajectory store to look at."""

from typing import Literal

from pydantic import Field

from agentrl.settings import Settings


class BufferSettings(Settings):
    """Retention of groups between rollout and training."""

    ledger_retention: Literal["until_checkpoint", "always"] = "until_checkpoint"
    """Time that the ledger keeps the samples of trained groups: until a checkpoint covers them, or always."""
    ledger_dir: str | None = None
    """Folder on a local disk for the ledger; the run's folder gets a copy with each checkpoint. By default the ledger
    is in the run's folder."""
    keep_trajectories: int = Field(100_000, ge=0)
    """Maximum trajectories in trajectories.sqlite; the oldest rollouts are deleted first; 0 keeps none."""
