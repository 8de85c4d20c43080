"""Adapters of other libraries' environments, chosen with `--env SCHEME:NAME`.

Each module has a function `environment(name)` that returns an `Environment` class. `agentrl.envs.load_environment` imports
the module only when a path names its scheme. A class must follow from its name alone: each rollout worker makes its own.
Without `--prompt-data`, `sample.group_index` is the seed or the number of the task.
"""
