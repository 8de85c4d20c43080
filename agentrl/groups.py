"""A group, and the contract between whoever plays groups and whoever keeps them."""

from collections.abc import Sequence
from typing import Protocol

from agentrl.sample import Sample

Group = list[Sample]
"""The samples of one prompt."""


class GroupStore(Protocol):
    """Where groups come from and where their fate is recorded, by group id (`Sample.group_index`)."""

    def lease(self, n: int, step: int) -> list[Group]:
        """At most `n` groups of pending samples for rollout `step`; fewer when the data has ended."""

    def complete(self, group_id: int, samples: Sequence[Sample]) -> None:
        """The group is finished and will be trained on."""

    def drop(self, group_id: int, reason: str) -> None:
        """The group is finished and will not be trained on."""

    def release(self, group_id: int, reason: str) -> None:
        """The group was started but is not needed in this rollout; it stays to be generated later."""
