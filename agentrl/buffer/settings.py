"""Settings of the ledger."""

from typing import Literal

from pydantic import Field

from agentrl.settings import Settings


class BufferSettings(Settings):
    """What is kept of the groups between rollout and training."""

    ledger_keep: Literal["until_checkpoint", "always"] = Field(
        "until_checkpoint",
        description="How long the ledger keeps the samples of trained groups: until a checkpoint covers them, or always.",
    )
