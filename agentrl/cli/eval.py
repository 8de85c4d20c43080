"""`agentrl eval`."""

import click

from agentrl.cli.settings_command import settings_command
from agentrl.config.settings import RunSettings


@settings_command(
    "eval",
    """
    agentrl eval --config run.yaml --hf-checkpoint runs/latest/model
    agentrl eval --hf-checkpoint ./model --env my_env.py:MyEnv \\
        --eval-prompt-data dev dev.jsonl --n-samples-per-eval-prompt 4
    """,
)
def command(settings: RunSettings) -> int:
    """Evaluate a model on held-out prompts, with the environment, parser and grader that training uses."""
    from agentrl.run.offline import evaluate

    for name, value in evaluate(settings).items():
        click.echo(f"{name:40s} {value:.4f}")
    click.echo(f"trajectories: {settings.observability.output_dir}/evaluation")
    return 0
