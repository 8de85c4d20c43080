"""Environments: the world that a model acts in.

Subclass `Environment`, name its `tools`, and override `reset`, `step` or `reward` as needed. An instance lives for one
trajectory; `setup` and `teardown` open and close resources of a process. A tool's failure is an observation; an
exception of the environment's code passes through. `load_environment` checks a class at start-up."""

from agentrl.envs.agent import AgentEnvironment, CommandEnvironment, command_environment
from agentrl.envs.base import Environment, Step, Turn
from agentrl.envs.environments import ALONE, EnvClasses, Environments, EnvSpec
from agentrl.envs.load import check_environment, load_environment
from agentrl.envs.users import ModelUser, ScriptedUser, SimulatedUser, UserEnvironment

__all__ = [
    "ALONE", "AgentEnvironment", "CommandEnvironment", "EnvClasses", "EnvSpec", "Environment", "Environments", "ModelUser",
    "ScriptedUser", "SimulatedUser", "Step", "Turn", "UserEnvironment", "check_environment", "command_environment",
    "load_environment",
]  # fmt: skip
