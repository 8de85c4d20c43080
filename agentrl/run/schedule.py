"""The order of a run's actions: pure code without clocks, tasks or processes. A run may be killed at any moment. A step
is recorded as trained and evaluated before its checkpoint is written, so that a resume repeats both or neither."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Do(Enum):
    """The kinds of action. The step of an action is the training step, from 0."""

    SEND = "bring the engines to the weights that were trained on this many rollouts"
    NEXT_BATCH = "have the step's batch generated"
    TRAIN = "train on the step's batch"
    EVALUATE = "evaluate after the step; -1 is before the first"
    SAVE = "write a checkpoint that covers steps up to this one"
    EXPORT = "write the model"


class Action(NamedTuple):
    """One thing to do."""

    do: Do
    step: int


@dataclass(frozen=True, slots=True)
class Cadence:
    """Intervals between actions, in steps; None is never."""

    steps: int  # steps in the whole run
    send: int | None = 1  # weight updates; also before every evaluation and after the last step
    evaluate: int | None = None  # evaluations; one more after the last step, of the exported model
    evaluate_first: bool = False  # also before the first step of a fresh run
    save: int | None = None  # checkpoints; one more after the last step


def actions(cadence: Cadence, first: int, data_ended: Callable[[], bool]) -> Iterator[Action]:
    """Yield a run's actions in order. The caller finishes an action before it requests the next. `first`: first step
    to train; above 0 if the run resumes. `data_ended` is called after NEXT_BATCH: true if there is no batch."""
    done = evaluated = saved = first - 1
    yield from _send(cadence, first)
    if first == 0 and cadence.evaluate_first:
        yield Action(Do.EVALUATE, -1)
    while done + 1 < cadence.steps:
        yield Action(Do.NEXT_BATCH, done + 1)
        if data_ended():
            break
        done += 1
        yield Action(Do.TRAIN, done)
        last = done + 1 == cadence.steps
        evaluating = _due(cadence.evaluate, done) or (last and cadence.evaluate is not None)
        if _due(cadence.send, done) or evaluating or last:
            yield from _send(cadence, done + 1)
        if evaluating:
            yield Action(Do.EVALUATE, done)
            evaluated = done
        if _due(cadence.save, done):
            yield Action(Do.SAVE, done)
            saved = done
    if evaluated < done and cadence.evaluate is not None:
        yield from _send(cadence, done + 1)
        yield Action(Do.EVALUATE, done)
    if saved < done:
        yield Action(Do.SAVE, done)
    yield Action(Do.EXPORT, done)


def _send(cadence: Cadence, version: int) -> Iterator[Action]:
    if cadence.send is not None:
        yield Action(Do.SEND, version)


def _due(interval: int | None, step: int) -> bool:
    return interval is not None and (step + 1) % interval == 0
