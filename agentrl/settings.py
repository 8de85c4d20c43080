"""The base of every settings model.

1. A room owns its settings: `agentrl/<room>/settings.py` holds one frozen `Settings` subclass.
2. Field names are the flags' names (`rollout_batch_size` is `--rollout-batch-size`), unique over all rooms,
   and where slime has a name for it, slime's.
3. Every field has a one-sentence `Field(description=...)`: it is the flag's help text.
"""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen, closed settings model: unknown keys are errors, nothing changes after validation."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
