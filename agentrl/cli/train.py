"""`agentrl train`."""

from agentrl.cli.settings_command import settings_command
from agentrl.config.settings import RunSettings


@settings_command("train")
def command(settings: RunSettings) -> int:
    """Train a model: generate trajectories, grade them, learn from them, and repeat.

    The same --output-dir given again resumes the run from its newest checkpoint."""
    from agentrl.cluster.launch import train, workers_of

    if settings.cluster.debug_rollout_only:
        from agentrl.run.offline import rollout

        rollout(settings.check_complete("train"), workers_of(settings))
        return 0

    return train(settings)
