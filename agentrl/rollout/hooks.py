"""Hooks around rollouts, through which `agentrl.compat` calls another trainer's functions."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentrl.engine.pool import EnginePool
from agentrl.groups import Group, GroupStore
from agentrl.plugins import compat


class RolloutHooks:
    """Hooks that do nothing. An error in a hook ends the rollout. `alone`: the setting of a function that needs all
    trajectories in the coordinator's process; "" if there is none."""

    alone = ""

    @asynccontextmanager
    async def opened(self, pool: EnginePool) -> AsyncIterator[None]:
        """Surround the time in which the process generates with `pool`."""
        yield

    def begin(self, step: int) -> None:
        """Called before the rollout of training step `step`, and before the evaluation after `step` rollouts."""

    async def generated(self, args: Any, samples: Group, evaluation: bool) -> Group:
        """Return the samples to reward, given the generated samples of a trajectory (or group)."""
        return samples

    def played(self, group: Group) -> None:
        """Called with a generated and rewarded training group, which may still be dropped."""

    def play(self, step: int, store: GroupStore) -> list[Group] | None:
        """Generate the rollout of `step`, in a thread; None: the coordinator generates it. There are fewer groups than
        `rollout_batch_size` only if the data ended."""
        return None

    def finished(self, groups: list[Group], source: Any) -> None:
        """Called with the groups of a rollout before they are trained, in a thread."""

    def log(self, groups: Sequence[Group], metrics: dict[str, float], seconds: float) -> bool:
        """Read or extend a rollout's metrics; return true if the run does not log them."""
        return False

    async def evaluate(self) -> Mapping[str, list[Group]] | None:
        """Evaluate and return the rewarded groups by name of their set; None: the run evaluates."""
        return None

    def log_evaluation(self, groups: Mapping[str, Sequence[Group]], metrics: dict[str, float]) -> bool:
        """Do the same as `log` with an evaluation's metrics."""
        return False


def rollout_hooks(args: Any) -> RolloutHooks:
    """Return the hooks of the run with these settings. Raises PluginError: a function is not found, or has a wrong
    signature. SettingsError: the settings contradict each other."""
    found = compat()
    return RolloutHooks() if found is None else found.rollout_hooks(args)
