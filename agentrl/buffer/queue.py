"""A data source joined to a ledger: what the rollout loop and the training driver talk to.

1. `lease` gives groups to generate whose `group_index` is the ledger's group id; the loop ends each of them with
   `complete`, `drop` or `release`, by id.
2. Prompts of the built-in source are rebuilt from the ledger's row. Groups of a user's source are stored when leased,
   so that a killed run gives the same prompts again whatever that source remembers.
3. The ledger is the buffer: groups given back wait in it, and the buffer filter chooses among them. A source with
   `get_samples` or `add_samples` of its own is shown every completed group by `add_samples`. Groups that it gives back
   finished are used as they are and not shown again. What its `save` writes lies beside the ledger and is loaded on
   resume.
4. `batch`, `trained` and `checkpointed` drive the training side; the steps are rollout numbers from 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from agentrl.buffer.ledger import Ledger
from agentrl.buffer.states import CompletedGroup, Lease, Recovery
from agentrl.data.order import Place
from agentrl.data.source import (
    BufferFilter,
    DataSource,
    Group,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    load_buffer_filter,
    number_group,
    take_from_buffer,
)
from agentrl.errors import PluginError
from agentrl.sample import Sample


class GroupFeed:
    """Leases groups of a source under a ledger.

    Args:
        source: the built-in source or a user's, as `load_source` gives it.
        ledger: open for writing.
        args: the flat settings.
        checkpoint_step: the last step that the loaded checkpoint covers; None when training starts afresh. The
            ledger is recovered to it at once, and `recovery` says what that changed.

    Raises:
        LedgerError: the ledger was made with other data, or belongs to another run.
    """

    def __init__(self, source: DataSource, ledger: Ledger, args: Any, checkpoint_step: int | None = None) -> None:
        self.source, self.ledger, self.args = source, ledger, args
        self._filter = _filter_of(source, args)
        # A source that draws in its own way is asked for samples; the built-in draw is a function of the position.
        self._placed = source if isinstance(source, RolloutDataSource) and _draws_as_built_in(source) else None
        if self._placed is not None:
            ledger.bind(self._placed.identity())
        self.recovery: Recovery = ledger.recover(checkpoint_step)
        self._replayed: set[int] = set()
        self._state = ledger.path.with_name(ledger.path.name + ".source")
        if self._placed is None and self._state.is_file() and len(ledger):
            source.load(self._state)

    def lease(self, n: int, step: int) -> list[Group]:
        """Up to `n` groups for rollout step `step`: those given back first, then new ones.

        Returns:
            fewer than `n` only when the source has come to its end.
        """
        leases = self._lease_waiting(n, step)
        groups = [self._build(lease) for lease in leases]
        missing = n - len(groups)
        if missing and self._placed is not None:
            groups += [self._build(lease) for lease in self.ledger.lease(missing, step, self._placed.place)]
        elif missing:
            given = self.source.get_samples(missing)
            groups += [self._renumber(lease) for lease in self.ledger.lease_given(given, step)]
            # Behind the leases: a kill in between repeats prompts, the other order would lose them.
            self._save_source()
        return groups

    def _save_source(self) -> None:
        draft = self._state.with_name(self._state.name + ".part")
        self.source.save(draft)
        if draft.is_file():
            os.replace(draft, self._state)

    def _lease_waiting(self, n: int, step: int) -> list[Lease]:
        if self._filter is None:
            return self.ledger.lease(n, step, lambda position: None)
        waiting = {
            group_id: self._start(group_id, samples, place) for group_id, samples, place in self.ledger.waiting()
        }
        if not waiting:
            return []
        buffer = list(waiting.values())
        ids = {id(group): group_id for group_id, group in waiting.items()}
        chosen = take_from_buffer(self._filter, self.args, buffer, n)
        return self.ledger.lease(n, step, choose=[ids[id(group)] for group in chosen])

    def _build(self, lease: Lease) -> Group:
        place = None if lease.prompt_index is None else Place(lease.epoch, lease.prompt_index)
        return self._start(lease.group_id, lease.start, place)

    def _start(self, group_id: int, start: list[Sample] | None, place: Place | None) -> Group:
        if start is not None:
            return self._given(start, group_id)
        if place is None or self._placed is None:
            raise PluginError(
                f"group {group_id} was made by the built-in data source; resume with the same --data-source-path as before"
            )
        return self._placed.build(group_id, place)

    def _renumber(self, lease: Lease) -> Group:
        assert lease.start is not None
        return self._given(lease.start, lease.group_id)

    def _given(self, start: list[Sample], group_id: int) -> Group:
        if all(sample.finished for sample in start):
            self._replayed.add(group_id)
        return number_group(start, group_id, self.args)

    def running(self, group_id: int) -> None:
        """The group's generation has begun."""
        self.ledger.mark_running(group_id)

    def complete(self, group_id: int, samples: Sequence[Sample]) -> None:
        """The group is finished: stored durably, then shown to the source's `add_samples` if it is new."""
        self.ledger.complete(group_id, samples)
        if self._placed is None and group_id not in self._replayed:
            self.source.add_samples([list(samples)])

    def drop(self, group_id: int, reason: str) -> None:
        """The group will never be trained; lease another in its stead."""
        self.ledger.drop(group_id, reason)

    def release(self, group_id: int, reason: str, samples: Sequence[Sample] | None = None) -> None:
        """Give the group back to be leased again; `samples` keep a partial rollout."""
        self.ledger.release(group_id, reason, samples)

    def batch(self, n: int, step: int) -> list[CompletedGroup]:
        """The groups to train at `step`: the same at every call (see `Ledger.take_completed`)."""
        return self.ledger.take_completed(n, step)

    def fix(self, n: int, step: int) -> list[int]:
        """Ids of the groups that `batch` would give, for a caller that still has their samples."""
        return self.ledger.fix_completed(n, step)

    def trained(self, group_ids: Iterable[int], step: int) -> None:
        """The optimiser step is done."""
        ids = list(group_ids)
        self.ledger.mark_trained(ids, step)
        self.source.commit(ids, step)
        if self._placed is None:
            self._save_source()

    def checkpointed(self, step: int) -> None:
        """A durable checkpoint covers every step up to `step`."""
        self.ledger.checkpointed(step)


def _draws_as_built_in(source: RolloutDataSource) -> bool:
    kind = type(source)
    bases = (RolloutDataSource, RolloutDataSourceWithBuffer)
    return any(kind.get_samples is b.get_samples and kind.add_samples is b.add_samples for b in bases)


def _filter_of(source: DataSource, args: Any) -> BufferFilter | None:
    """The choice among groups given back; None is the plain one, lowest number first."""
    if isinstance(source, RolloutDataSourceWithBuffer):
        return source.buffer_filter
    path: str | None = getattr(args, "buffer_filter_path", None)
    return load_buffer_filter(path) if path else None
