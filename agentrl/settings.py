"""The base of every settings model.

1. A room owns its settings: `agentrl/<room>/settings.py` holds one frozen `Settings` subclass.
2. Field names are the flags' names (`rollout_batch_size` is `--rollout-batch-size`), unique over all rooms,
   and where slime has a name for it, slime's.
3. Every field has a one-sentence `Field(description=...)`: it is the flag's help text.
4. Secrets (`api_key` and the like among options passed on, passwords in URLs) are never printed nor written: what shows
   a value shows `shown(value)`.
5. A value is one that can be computed with and written down: no number is NaN or infinite or, if whole, beyond 64 bits; no
   text holds half a surrogate pair.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, field_validator

from agentrl.errors import SECRET, without_secrets

_SECRET_KEY = re.compile(r"(^|[_-])(key|token|password|passphrase|secret|credentials?)$", re.IGNORECASE)


def shown(value: Any, key: object = "") -> Any:
    """`value` as it may be shown; `key` is what it is called in the mapping that it is from."""
    if value is not None and _SECRET_KEY.search(str(key)):
        return SECRET
    if isinstance(value, Mapping):
        return {name: shown(inner, name) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [shown(inner) for inner in value]
    return without_secrets(value) if isinstance(value, str) else value


def flag_of(name: str) -> str:
    """What a setting is called on the command line."""
    return "--" + name.replace("_", "-")


class Settings(BaseModel):
    """A frozen, closed settings model: unknown keys are errors, nothing changes after validation."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _can_be_written(cls, value: Any) -> Any:
        try:
            orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)
        except TypeError as error:
            raise ValueError(f"{error}: a run could not write it down") from error
        return value

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        return ((name, shown(value)) for name, value in super().__repr_args__())
