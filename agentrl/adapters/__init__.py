"""Adapters of other libraries' environments, chosen with `--env SCHEME:NAME`.

Each module has a function `environment(name)` that returns an `Environment` class. `agentrl.envs.load_environment` imports
the module only when a path names its scheme. A class must follow from its name alone: each rollout worker makes its own.
Without `--prompt-data`, `sample.group_index` is the seed or the number of the task."""

from agentrl.errors import EnvFailure
from agentrl.sample import Message, Sample


def task_number(sample: Sample, *, least: float = 0) -> int | None:
    """Return the seed or number of the task: the row's `metadata["task"]`, or else the group's number. Raises EnvFailure:
    the row gives no whole number of at least `least`."""
    number = sample.metadata.get("task", sample.group_index)
    if number is None or (type(number) is int and number >= least):
        return number
    raise EnvFailure(
        f"metadata['task'] must be a whole number{' from 0' * (least == 0)}, got {number!r:.100}", kind="env_task"
    )


def first_messages(sample: Sample, rules: str, *parts: str) -> list[Message]:
    """Return the row's messages, and a user message of `rules` and `parts`. A row's plain text replaces `rules`."""
    own, rules = ([], sample.prompt or rules) if isinstance(sample.prompt, str) else (list(sample.prompt), rules)
    return [*own, {"role": "user", "content": "\n\n".join(filter(None, (rules, *parts)))}]
