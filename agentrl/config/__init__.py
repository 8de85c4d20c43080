"""Settings of a run: one pydantic model per package. They are read from flags and files, and checked together.
`--dry-run` prints them.

settings = RunSettings.from_cli(["--config", "run.yaml", "--lr", "1e-5"])
settings.rollout.rollout_batch_size     # typed sections
settings.args.rollout_batch_size        # for user functions: a read-only flat view under slime's names"""

from agentrl.config.args import Args
from agentrl.config.settings import Purpose, RunSettings

__all__ = ["Args", "Purpose", "RunSettings"]
