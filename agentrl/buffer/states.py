"""The ledger's vocabulary: a group's states, the legal moves between them, and what the ledger hands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from agentrl.data.order import Place
from agentrl.groups import Group


class State(StrEnum):
    """Where a group is."""

    WAITING = "waiting"
    """Made, given back, and not leased: it is leased again before any new prompt."""
    LEASED = "leased"
    """Handed to the rollout runner."""
    COMPLETED = "completed"
    """Its samples are stored and wait to be trained."""
    TRAINED = "trained"
    """An optimiser step used it."""
    DROPPED = "dropped"
    """It will never be trained; the reason says why."""


MOVES: Mapping[State, frozenset[State]] = {
    State.WAITING: frozenset({State.LEASED, State.DROPPED}),
    State.LEASED: frozenset({State.COMPLETED, State.WAITING, State.DROPPED}),
    State.COMPLETED: frozenset({State.TRAINED, State.DROPPED, State.WAITING}),
    State.TRAINED: frozenset(),
    State.DROPPED: frozenset(),
}
"""The legal moves outside `recover`."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A group to generate: its prompt's place in the data, or None where only its maker knows the prompt.

    `start` holds the samples to start from when they cannot be rebuilt from the prompt's place.
    """

    group_id: int
    place: Place | None
    start: Group | None


@dataclass(frozen=True, slots=True)
class Recovery:
    """What `recover` changed, in group ids."""

    replayed: tuple[int, ...]
    """Trained after the checkpoint; their stored samples will be trained again at the same steps."""
    remade: tuple[int, ...]
    """Trained after the checkpoint, samples pruned, or sampled by weights that came after such: leased again."""
    released: tuple[int, ...]
    """Leased when the run stopped: leased again."""
    proved: tuple[int, ...]
    """Trained by the checkpoint's own evidence although the run stopped before it could write so."""
