"""A group, and the contract between the generating side and the store of groups."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from agentrl.errors import AgentRLError
from agentrl.sample import Sample

Group = list[Sample]  # the samples of one prompt


def group_id(group: Group) -> int:
    """Returns the ledger's number of a group."""
    index = group[0].group_index
    if index is None:
        raise AgentRLError("a group's samples have no group_index; take groups from a data source")
    return index


class Kept(NamedTuple):
    """Completed groups that wait to be trained: how many, by version, and how many tokens of theirs train."""

    groups: Counter[int]
    tokens: int


class GroupStore(Protocol):
    """The source of groups and the record of their outcomes, by group id (`Sample.group_index`).

    A group's version is the number of rollouts that the weights had been trained on when it was leased.

        for group in store.lease(8, version=0):
            store.complete(group_id(group), played(group))
        groups = store.next_batch(8, step=0)"""

    def lease(self, n: int, version: int) -> list[Group]:
        """At most `n` groups of pending samples, to be played under `version`; fewer when the data has ended."""

    def insert_external(self, groups: Sequence[Group], version: int) -> list[int]:
        """Groups that no source gave; from here on they are as if leased under `version`. Returns their ids."""

    def complete(
        self, group_id: int, samples: Sequence[Sample], data: bytes | None = None, rewards: Sequence[float] = ()
    ) -> None:
        """The group is finished and will be trained on; `data` is what `codec.encode_group` makes of it. `rewards`: of its
        trajectories, as far as known; later prompts are drawn by them. Several threads may call `complete`, `drop` and
        `release` at once."""

    def drop(self, group_id: int, reason: str, samples: Sequence[Sample] = (), rewards: Sequence[float] = ()) -> None:
        """The group is finished and will not be trained on; `samples` are what was played of it, where that is known.
        `rewards`: as `complete` takes them."""

    def release(self, group_id: int, reason: str) -> None:
        """The group was started but is not needed any more; it stays to be generated later."""

    def kept(self, step: int) -> Kept:
        """Return the groups that wait for batch `step` or later ones."""

    def expire(self, oldest: int, reason: str, again: bool) -> Kept:
        """Completed groups of versions before `oldest` are not trained on: made `again`, or dropped. Groups that are fixed
        for a batch stay. Returns these groups and their tokens."""

    def next_batch(self, n: int, step: int) -> list[Group]:
        """The `n` groups of batch `step`, oldest first, the same at every call; fewer when there are no more."""
