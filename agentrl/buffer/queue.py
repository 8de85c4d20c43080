"""A data source joined to a ledger: what the rollout runner and the training driver talk to.

1. `lease` gives groups to generate whose `group_index` is the ledger's group id; the runner ends each of them with
   `complete`, `drop` or `release`, by id.
2. Prompts of the built-in source are rebuilt from the ledger's row. Groups of a user's source are stored when leased,
   so that a killed run gives the same prompts again whatever that source remembers.
3. The ledger is the buffer: groups given back wait in it, and the buffer filter chooses among them. A source with
   `get_samples` or `add_samples` of its own is shown every completed group by `add_samples`. Groups that it gives back
   finished are used as they are and not shown again. What its `save` writes lies beside the ledger and is loaded on
   resume.
4. `next_batch`, `trained` and `checkpointed` drive the training side; the steps are rollout numbers from 0. The ledger
   alone says which groups a step trains and in which order; samples that this process completed itself are kept,
   compact, until they are handed over, others are read from the ledger. A group's version is the step from which on it
   can be trained.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from agentrl.buffer.ledger import Ledger
from agentrl.buffer.states import LedgerLease
from agentrl.buffer.store import TrajectoryStore
from agentrl.data.source import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer, number_group
from agentrl.errors import PluginError
from agentrl.files import replacing
from agentrl.groups import Group, GroupStore, Kept
from agentrl.sample import Sample


class GroupQueue(GroupStore):
    """Joins a source, its filter and a ledger.

    Args:
        source: the built-in source or a user's, as `load_source` gives it.
        ledger: open for writing.
        checkpoint_step: the last step that the loaded checkpoint covers; None when training starts afresh. The
            ledger is recovered to it at once.
        trajectories: where groups that are dropped can be looked at.

    Raises:
        LedgerError: the ledger was made with other data, or belongs to another run.
    """

    def __init__(
        self,
        source: DataSource,
        ledger: Ledger,
        checkpoint_step: int | None = None,
        trajectories: TrajectoryStore | None = None,
    ) -> None:
        self.source, self.ledger, self.trajectories = source, ledger, trajectories
        # A source that draws in its own way is asked for samples; the built-in draw is a function of the position.
        self._placed = source if isinstance(source, RolloutDataSource) and _draws_as_built_in(source) else None
        if self._placed is not None:
            ledger.bind(self._placed.identity())
        ledger.recover(checkpoint_step)
        self._replayed: set[int] = set()
        self._completed: dict[int, Group] = {}
        # The runner's thread and the driver's calls meet here; a user's source need not bear two at once.
        self._alone = threading.Lock()
        self._state = ledger.path.with_name(ledger.path.name + ".source")
        if self._placed is None and self._state.is_file() and len(ledger):
            source.load(self._state)

    def lease(self, n: int, version: int) -> list[Group]:
        """As of `GroupStore`: groups given back first, then new ones."""
        with self._alone:
            groups = [self._start(lease) for lease in self._lease_waiting(n, version)]
            if missing := n - len(groups):
                groups += [self._start(lease) for lease in self._lease_new(missing, version)]
        return groups

    def _lease_waiting(self, n: int, version: int) -> list[LedgerLease]:
        if (choose := self.source.choice) is None:
            return self.ledger.lease_waiting(n, version)
        waiting = [(lease.group_id, self._start(lease)) for lease in self.ledger.waiting()]
        ids = {id(group): group_id for group_id, group in waiting}
        chosen = choose([group for _, group in waiting], n) if waiting else []
        return self.ledger.lease_waiting(n, version, choose=[ids[id(group)] for group in chosen])

    def _lease_new(self, n: int, version: int) -> list[LedgerLease]:
        if self._placed is not None:
            return self.ledger.lease_new(n, version, self._placed.place)
        leases = self.ledger.lease_given(self.source.get_samples(n), version)
        # Behind the leases: a kill in between repeats prompts, the other order would lose them.
        self._save_source()
        return leases

    def _save_source(self) -> None:
        with replacing(self._state) as draft:
            self.source.save(draft)

    def _start(self, lease: LedgerLease) -> Group:
        if lease.start is not None:
            if all(sample.finished for sample in lease.start):
                self._replayed.add(lease.group_id)
            return number_group(lease.start, lease.group_id, self.source.n_samples_per_prompt)
        if lease.place is None or self._placed is None:
            raise PluginError(
                f"group {lease.group_id} was made by the built-in data source; "
                "resume with the same --data-source-path as before"
            )
        return self._placed.build(lease.group_id, lease.place)

    def insert_external(self, groups: Sequence[Group], version: int) -> list[int]:
        return [lease.group_id for lease in self.ledger.lease_given(groups, version)]

    def complete(self, group_id: int, samples: Sequence[Sample], data: bytes | None = None) -> None:
        """The group is finished: stored durably, then shown to the source's `add_samples` if it is new."""
        self.ledger.complete(group_id, samples, data)
        if self._placed is None and group_id not in self._replayed:
            with self._alone:
                self.source.add_samples([list(samples)])
        # A user's source may have kept the samples, and goes on reading their lists.
        self._completed[group_id] = list(samples) if self._placed is None else _compact(samples)

    def drop(self, group_id: int, reason: str, samples: Sequence[Sample] = ()) -> None:
        self.ledger.drop(group_id, reason)
        if self.trajectories is not None:
            self.trajectories.drop(samples, reason)
        self._completed.pop(group_id, None)

    def release(self, group_id: int, reason: str) -> None:
        self.ledger.release(group_id, reason)

    def kept(self, step: int) -> Kept:
        return self.ledger.kept(step)

    def expire(self, oldest: int, reason: str, again: bool) -> int:
        expired = self.ledger.expire(oldest, reason, again=again)
        for group_id in expired:
            self._completed.pop(group_id, None)
        return sum(expired.values())

    def next_batch(self, n: int, step: int) -> list[Group]:
        """As of `GroupStore`, and `Ledger.assign_batch`. A full batch is handed over: a later call reads it from the ledger."""
        ids = self.ledger.assign_batch(n, step)
        groups = [self._completed.get(group_id) or _compact(self.ledger.samples(group_id)) for group_id in ids]
        if len(ids) >= n:
            for group_id in ids:
                self._completed.pop(group_id, None)
        return groups

    def trained(self, group_ids: Iterable[int], step: int) -> None:
        """The optimiser step is done."""
        ids = list(group_ids)
        self.ledger.mark_trained(ids, step)
        with self._alone:
            self.source.commit(ids, step)
            if self._placed is None:
                self._save_source()

    def checkpointed(self, step: int) -> None:
        """A durable checkpoint covers every step up to `step`."""
        self.ledger.checkpointed(step)


def _compact(samples: Sequence[Sample]) -> Group:
    return [sample.compact() for sample in samples]


def _draws_as_built_in(source: RolloutDataSource) -> bool:
    kind = type(source)
    bases = (RolloutDataSource, RolloutDataSourceWithBuffer)
    return any(kind.get_samples is b.get_samples and kind.add_samples is b.add_samples for b in bases)
