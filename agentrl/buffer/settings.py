"""Settings of what is kept of groups: in the ledger to train on, in the trajectory store to look at."""

from typing import Literal

from pydantic import Field

from agentrl.settings import Settings


class BufferSettings(Settings):
    """What is kept of the groups between rollout and training."""

    ledger_keep: Literal["until_checkpoint", "always"] = Field(
        "until_checkpoint",
        description="How long the ledger keeps the samples of trained groups: until a checkpoint covers them, or always.",
    )
    keep_trajectories: int = Field(
        100_000,
        ge=0,
        description="How many trajectories trajectories.sqlite keeps to look at, the oldest rollouts going first; 0: none.",
    )
