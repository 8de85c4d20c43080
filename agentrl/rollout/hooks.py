"""Hooks around rollouts: the moments at which another trainer's functions are called (`agentrl.compat`)."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentrl.engine.pool import EnginePool
from agentrl.groups import Group, GroupStore
from agentrl.plugins import compat


class RolloutHooks:
    """Every method of this one does nothing; what raises ends the rollout. `alone`: setting of a function that needs
    all trajectories in the coordinator's process; "" if there is none."""

    alone = ""

    @asynccontextmanager
    async def opened(self, pool: EnginePool) -> AsyncIterator[None]:
        """While the process generates with `pool`."""
        yield

    def begin(self, step: int) -> None:
        """The rollout of training step `step` begins, or the evaluation after `step` rollouts."""

    async def generated(self, args: Any, samples: Group, evaluation: bool) -> Group:
        """The samples of a trajectory (or group) that was played, before they are rewarded; returns those to go on with."""
        return samples

    def played(self, group: Group) -> None:
        """A group of training was played and rewarded; it may still be dropped."""

    def play(self, step: int, store: GroupStore) -> list[Group] | None:
        """Play the rollout of `step` in the runner's place, in a thread; None: it plays it."""
        return None

    def finished(self, groups: list[Group], source: Any) -> None:
        """The groups of a rollout, before they are trained; in a thread."""

    def log(self, groups: Sequence[Group], metrics: dict[str, float], seconds: float) -> bool:
        """A rollout's metrics, which may be added to; true: they are not logged."""
        return False

    async def evaluate(self) -> Mapping[str, list[Group]] | None:
        """Evaluate in the run's place: rewarded groups by name of their set; None: the run does."""
        return None

    def log_evaluation(self, groups: Mapping[str, Sequence[Group]], metrics: dict[str, float]) -> bool:
        """An evaluation's metrics; as of `log`."""
        return False


def rollout_hooks(args: Any) -> RolloutHooks:
    """Those of the run with these settings. Raises PluginError: a function is not found, or cannot be called as it
    must. SettingsError: the settings contradict each other."""
    found = compat()
    return RolloutHooks() if found is None else found.rollout_hooks(args)
