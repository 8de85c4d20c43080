"""A group, and the contract between the generating side and the store of groups."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from agentrl.errors import AgentRLError
from agentrl.sample import Sample

Group = list[Sample]  # the samples of one prompt


def group_id(group: Group) -> int:
    """Return a group's number in the ledger."""
    index = group[0].group_index
    if index is None:
        raise AgentRLError("a group's samples have no group_index; take groups from a data source")
    return index


def trajectories(group: Sequence[Sample]) -> list[Group]:
    """Return a group's samples by trajectory, in order; samples of one trajectory form one list."""
    seen: dict[object, Group] = {}
    for at, sample in enumerate(group):
        seen.setdefault(("own", at) if sample.rollout_id is None else ("shared", sample.rollout_id), []).append(sample)
    return list(seen.values())


class Kept(NamedTuple):
    """Completed groups that wait to be trained: their number by version, and their number of trained tokens."""

    groups: Counter[int]
    tokens: int


class GroupStore(Protocol):
    """The source of groups and the record of their outcomes, by group id (`Sample.group_index`).

    A group's version is the number of rollouts that the weights had been trained on when it was leased.

        for group in store.lease(8, version=0):
            store.complete(group_id(group), played(group))
        groups = store.next_batch(8, step=0)"""

    def lease(self, n: int, version: int) -> list[Group]:
        """Return at most `n` groups of pending samples to generate under `version`; fewer if the data has ended."""

    def insert_external(self, groups: Sequence[Group], version: int) -> list[int]:
        """Add groups from outside the data source, as if they were leased under `version`. Returns their ids."""

    def complete(
        self, group_id: int, samples: Sequence[Sample], data: bytes | None = None, rewards: Sequence[float] = ()
    ) -> None:
        """Record that a group is finished and will be trained on. `data`: the group as `codec.encode_group` encodes it.
        `rewards`: the known rewards of its trajectories, for the choice of later prompts. Several threads may call
        `complete`, `drop` and `release` at once."""

    def drop(self, group_id: int, reason: str, samples: Sequence[Sample] = (), rewards: Sequence[float] = ()) -> None:
        """Record that a group is finished and will not be trained on. `samples`: the generated samples, if known.
        `rewards`: as in `complete`."""

    def release(self, group_id: int, reason: str) -> None:
        """Record that a group was started but is not needed now. The group will be generated later."""

    def kept(self, step: int) -> Kept:
        """Return the groups that wait for batch `step` or a later batch."""

    def expire(self, oldest: int, reason: str, again: bool) -> Kept:
        """Expire the completed groups of versions before `oldest`: generate them again (`again`), or drop them. Groups
        that are assigned to a batch stay. Returns the expired groups and their tokens."""

    def next_batch(self, n: int, step: int) -> list[Group]:
        """Return the `n` groups of batch `step`, oldest first, the same at every call; fewer if no more exist."""
