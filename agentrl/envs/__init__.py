"""Environments: what a model acts in.

1. Subclass `Environment`, name its `tools`, and where the defaults do not fit override `reset`, `step`, `reward`.
   One instance lives for one trajectory; `setup` and `teardown` open and close what a process shares.
2. A tool's failure is an observation for the model, counted in `Step.info`. An exception of the environment's own
   code passes through: the agent loop puts the environment's name on it.
3. `load_environment` finds a class by path and checks it, so that a mistake in its definition shows at start-up.
   `Environments` are those of a run, with the arguments of each.
4. This room imports neither torch nor ray.
"""

from agentrl.envs.base import Environment
from agentrl.envs.environments import ALONE, Entry, Environments, Kinds
from agentrl.envs.load import check_environment, load_environment
from agentrl.envs.turn import Step, Turn

__all__ = [
    "ALONE",
    "Entry",
    "Environment",
    "Environments",
    "Kinds",
    "Step",
    "Turn",
    "check_environment",
    "load_environment",
]
