"""Settings of a run: one model per package, composed; read from flags and files, checked together, `--dry-run` shows
them.

settings = RunSettings.from_cli(["--config", "run.yaml", "--lr", "1e-5"])
settings.rollout.rollout_batch_size     # typed sections
settings.args.rollout_batch_size        # for user functions: a read-only flat view under slime's names
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.config.args import Args
    from agentrl.config.settings import Purpose, RunSettings

_HOMES = {"Args": "agentrl.config.args", "Purpose": "agentrl.config.settings", "RunSettings": "agentrl.config.settings"}

__all__ = ["Args", "Purpose", "RunSettings"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'agentrl.config' has no attribute {name!r}")
