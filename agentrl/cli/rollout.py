"""`agentrl rollout`."""

import click

from agentrl.cli.settings_command import settings_command
from agentrl.config.settings import RunSettings


@settings_command("rollout")
def command(settings: RunSettings) -> int:
    """Generate and grade trajectories without training: to try an environment, or to collect data.

    A second command with the same --output-dir adds rollouts up to --num-rollout, and overwrites nothing. A hosted model
    (--engine openai) plays without token ids; its conversations are also written for `agentrl sft`."""
    from pathlib import Path

    from agentrl.cluster.launch import workers_of
    from agentrl.run.offline import rollout
    from agentrl.runfolder import BELOW, DEMONSTRATIONS

    samples = rollout(settings, workers_of(settings))
    folder = Path(settings.observability.output_dir).expanduser() / BELOW["rollout"]
    click.echo(f"{samples} samples added to {settings.observability.save_debug_rollout_data or folder}")
    if settings.hosted:
        click.echo(f"conversations for `agentrl sft --prompt-data`: {folder / DEMONSTRATIONS}")
    return 0
