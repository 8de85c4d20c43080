"""`agentrl rollout`."""

import click

from agentrl.cli.settings_command import settings_command
from agentrl.config.settings import RunSettings


@settings_command(
    "rollout",
    """
    agentrl rollout --config run.yaml --num-rollout 1
    agentrl rollout --hf-checkpoint ./model --env my_env.py:MyEnv \\
        --prompt-data train.jsonl --num-rollout 1
    """,
)
def command(settings: RunSettings) -> int:
    """Generate and grade trajectories without training: to try an environment, or to collect data.

    Given the same --output-dir again it goes on to --num-rollout rollouts; nothing that is there is overwritten.
    """
    from agentrl.run.offline import rollout

    samples = rollout(settings)
    where = settings.observability.save_debug_rollout_data or f"{settings.observability.output_dir}/rollouts"
    click.echo(f"{samples} samples added to {where}")
    return 0
