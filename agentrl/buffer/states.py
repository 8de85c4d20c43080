"""The ledger's vocabulary: a group's states, the legal moves between them, and what the ledger hands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from agentrl.sample import Sample


class State(StrEnum):
    """Where a group is."""

    WAITING = "waiting"
    """Made, given back, and not leased: it is leased again before any new prompt."""
    LEASED = "leased"
    """Handed to the rollout loop."""
    RUNNING = "running"
    """Being generated."""
    COMPLETED = "completed"
    """Its samples are stored and wait to be trained."""
    TRAINED = "trained"
    """An optimiser step used it."""
    DROPPED = "dropped"
    """It will never be trained; the reason says why."""


MOVES: Mapping[State, frozenset[State]] = {
    State.WAITING: frozenset({State.LEASED, State.DROPPED}),
    State.LEASED: frozenset({State.RUNNING, State.COMPLETED, State.WAITING, State.DROPPED}),
    State.RUNNING: frozenset({State.COMPLETED, State.WAITING, State.DROPPED}),
    State.COMPLETED: frozenset({State.TRAINED, State.DROPPED}),
    State.TRAINED: frozenset(),
    State.DROPPED: frozenset(),
}
"""The legal moves outside `recover`."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A group to generate: its prompt's place, and how often it was leased (1 the first time).

    `start` holds the samples to start from when they cannot be rebuilt from the prompt's place.
    """

    group_id: int
    epoch: int
    prompt_index: int | None
    step: int
    attempts: int
    start: list[Sample] | None = None


@dataclass(frozen=True, slots=True)
class CompletedGroup:
    """A finished group: its samples and the rollout step that it was leased for."""

    group_id: int
    step: int
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class Recovery:
    """What `recover` changed, in group ids."""

    checkpoint_step: int
    replayed: tuple[int, ...]
    """Trained after the checkpoint; their stored samples will be trained again at the same steps."""
    remade: tuple[int, ...]
    """Trained after the checkpoint, samples pruned: leased again."""
    released: tuple[int, ...]
    """Leased or running when the run stopped: leased again."""
    proved: tuple[int, ...]
    """Trained by the checkpoint's own evidence although the run stopped before it could write so."""
