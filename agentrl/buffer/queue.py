"""The interface of data source and ledger for the rollout coordinator and the training driver.

1. `lease` gives groups to generate, numbered by the ledger; each of them ends with `complete`, `drop` or `release`.
2. Prompts of the built-in source are rebuilt from the ledger's row. Groups of a user's source are stored when leased,
   so that a killed run gives the same prompts again.
3. The ledger is the buffer: released groups wait in it, and the buffer filter chooses among them. If a source
   overrides `get_samples` or `add_samples`, its `add_samples` gets every completed group, except groups that were
   finished at the draw. After each draw and each trained step, its `save` writes a file beside the ledger. A resume
   loads this file, then gives `add_samples` the groups that completed after it. A kill during `save` repeats groups.
4. The ledger alone decides which groups a step trains and in which order. This process keeps the samples that it
   completed, compact, until they are in a batch. Other samples are read from the ledger."""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from agentrl.buffer.codec import decode_group
from agentrl.buffer.difficulty import DifficultyOrder
from agentrl.buffer.ledger import Ledger, LedgerLease
from agentrl.buffer.local import SOURCE, copy_ledger
from agentrl.buffer.store import TrajectoryStore
from agentrl.data.source import DataSource, RolloutDataSource, drawn_by_position, number_group
from agentrl.errors import LedgerError, PluginError, raised_as
from agentrl.files import replacing
from agentrl.groups import Group, GroupStore, Kept
from agentrl.sample import Sample


class GroupQueue(GroupStore):
    """Joins a source (the built-in one or a user's), its filter and a ledger, which is open for writing. The ledger is
    recovered at once to `checkpoint_step`, the last step that the loaded checkpoint covers; None without a checkpoint.
    `trajectories`: store of the samples of dropped groups, for the viewer. `copy`: file that gets a copy of the ledger
    with each checkpoint, if the ledger is another file. `batch`: groups of a step, for `Ledger.recover`. Raises
    LedgerError: the ledger was made with other data, or belongs to another run."""

    def __init__(
        self,
        source: DataSource,
        ledger: Ledger,
        checkpoint_step: int | None = None,
        trajectories: TrajectoryStore | None = None,
        copy: Path | None = None,
        batch: int | None = None,
    ) -> None:
        self.source, self.ledger, self.trajectories = source, ledger, trajectories
        self._placed = source if isinstance(source, RolloutDataSource) and drawn_by_position(source) else None
        if self._placed is not None:
            ledger.bind(self._placed.identity())
        ledger.recover(checkpoint_step, batch)
        self._difficulty: DifficultyOrder | None = None
        if self._placed is not None and self._placed.order and self._placed.prompt_order == "difficulty":
            self._difficulty = DifficultyOrder(self._placed.order, ledger)
        self._replayed, self._completed = set[int](), dict[int, Group]()
        self._handing = set[int]()  # groups that are completed or about to be, and that the source does not have yet
        # The coordinator's thread and the driver call this queue; a user's source need not be thread-safe.
        self._alone = threading.Lock()
        self._state = ledger.path.with_name(ledger.path.name + SOURCE)
        self._copy = None if copy == ledger.path else copy
        if self._placed is None and self._state.is_file() and len(ledger):
            source.load(self._state)
            for lease in ledger.not_handed():
                self._start(lease)  # records a group that was finished at the draw
                if lease.group_id not in self._replayed:
                    source.add_samples([ledger.samples(lease.group_id)])

    def lease(self, n: int, version: int) -> list[Group]:
        """Lease groups (see `GroupStore`): released groups first, then new groups."""
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
            chosen = self._difficulty and partial(self._difficulty.at, version=version)
            return self.ledger.lease_new(n, version, chosen or self._placed.place)
        leases = self.ledger.lease_given(self.source.get_samples(n), version)
        # After the leases: a kill in between repeats prompts. In the other order it would lose prompts.
        self._save_source()
        return leases

    def _save_source(self) -> None:
        with replacing(self._state) as draft:
            self.source.save(draft)
        self.ledger.handed(self._handing)

    def _start(self, lease: LedgerLease) -> Group:
        if lease.start is not None:
            if all(sample.finished for sample in lease.start):
                self._replayed.add(lease.group_id)
            return number_group(lease.start, lease.group_id, self.source.n_samples_per_prompt)
        if lease.place is None or self._placed is None:
            remedy = "resume with the same --data-source-path as before"
            raise PluginError(f"group {lease.group_id} was made by the built-in data source; {remedy}")
        return self._placed.build(lease.group_id, lease.place)

    def insert_external(self, groups: Sequence[Group], version: int) -> list[int]:
        return [lease.group_id for lease in self.ledger.lease_given(groups, version)]

    def complete(
        self, group_id: int, samples: Sequence[Sample], data: bytes | None = None, rewards: Sequence[float] = ()
    ) -> None:
        """Store a finished group durably, then pass it to the source's `add_samples` if it is new."""
        if data and not samples:  # another process played the group
            samples = decode_group(data, f"group {group_id}", compact=self._placed is not None)
        if handed := self._placed is None and group_id not in self._replayed:
            self._handing.add(group_id)
        self.ledger.complete(group_id, samples, data, rewards)
        if self._difficulty is not None:
            self._difficulty.finished(rewards)
        if handed:
            with self._alone:
                self.source.add_samples([list(samples)])
                self._handing.discard(group_id)
        if self._placed is not None:  # a user's source may keep these samples and change them
            self._completed[group_id] = [sample.compact() for sample in samples]

    def drop(self, group_id: int, reason: str, samples: Sequence[Sample] = (), rewards: Sequence[float] = ()) -> None:
        self.ledger.drop(group_id, reason, rewards)
        if self._difficulty is not None:
            self._difficulty.finished(rewards)
        if self.trajectories is not None:
            self.trajectories.drop(samples, reason)
        self._completed.pop(group_id, None)

    def release(self, group_id: int, reason: str) -> None:
        self.ledger.release(group_id, reason)

    def kept(self, step: int) -> Kept:
        return self.ledger.kept(step)

    def expire(self, oldest: int, reason: str, again: bool) -> Kept:
        expired = self.ledger.expire(oldest, reason, again=again)
        for group_id in expired:
            self._completed.pop(group_id, None)
        return Kept(Counter(version for version, _ in expired.values()), sum(tokens for _, tokens in expired.values()))

    def next_batch(self, n: int, step: int) -> list[Group]:
        """Return a batch (see `GroupStore`, `Ledger.assign_batch`). Later calls read a full batch from the ledger."""
        ids = self.ledger.assign_batch(n, step)
        groups = [self._completed.get(group_id) or self.ledger.samples(group_id, compact=True) for group_id in ids]
        for group_id in ids if len(ids) >= n else ():
            self._completed.pop(group_id, None)
        return groups

    def figures(self) -> dict[str, float]:
        """Return metrics of the draw by difficulty since the last call; none if prompts are drawn in another order."""
        return {} if self._difficulty is None else self._difficulty.figures()

    def trained(self, group_ids: Iterable[int], step: int) -> None:
        ids = list(group_ids)
        self.ledger.mark_trained(ids, step)
        with self._alone:
            self.source.commit(ids, step)
            if self._placed is None:
                self._save_source()

    def saving(self) -> None:
        """Copy the ledger, as a checkpoint is about to be written. Raises LedgerError: it cannot be copied."""
        what = f"ledger {self.ledger.path} cannot be copied to {self._copy}"
        # If the source were saved between the two copies, the copied ledger would claim groups missing in its copy.
        alone = self._alone if self._placed is None else nullcontext()
        with alone, raised_as(LedgerError, what, OSError, sqlite3.Error):
            if self._copy is not None:
                copy_ledger(self.ledger.path, self._copy)

    def checkpointed(self, step: int) -> None:
        self.ledger.checkpointed(step)
