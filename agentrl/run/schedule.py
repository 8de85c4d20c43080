"""The order of a run: a pure state machine without clocks, tasks or processes.

It is told what has happened (`batch_ready`, `data_ended`, `trained`) and says what to do `next`. The order makes
every moment safe to be killed at: a step is recorded as trained before the checkpoint that contains it is written,
and an evaluation comes before the checkpoint, so that a resume repeats both or neither.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Do(Enum):
    """What there is to do. The step of an action is the training step, from 0."""

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
    """How often things happen, in steps; None is never.

    Attributes:
        steps: steps in the whole run.
        send: weights to the engines. They also go there before every evaluation and after the last step.
        evaluate: evaluations; one more follows the last step, so that the model that is written was evaluated.
        evaluate_first: also before the first step of a fresh run.
        save: checkpoints; one more covers the last step.
    """

    steps: int
    send: int | None = 1
    evaluate: int | None = None
    evaluate_first: bool = False
    save: int | None = None


class Schedule:
    """What a run does next.

    Args:
        cadence: how often.
        first: the first step to train; above 0 when the run goes on from a checkpoint.
    """

    def __init__(self, cadence: Cadence, first: int = 0) -> None:
        self._cadence, self._first = cadence, first
        self._done = self._saved = self._evaluated = first - 1
        self._todo: deque[Action] = deque()
        self._send(first)
        if first == 0 and cadence.evaluate_first:
            self._todo.append(Action(Do.EVALUATE, -1))
        self._go_on()

    def next(self) -> Action | None:
        """What to do now; None at the end of the run."""
        return self._todo.popleft() if self._todo else None

    def batch_ready(self, step: int) -> None:
        """The batch of `step` is there."""
        self._todo.append(Action(Do.TRAIN, step))

    def data_ended(self) -> None:
        """There will be no further batch."""
        self._finish()

    def trained(self, step: int) -> None:
        """The optimizer has taken the steps of `step`, and the ledger says so."""
        self._done = step
        last = step == self._cadence.steps - 1
        evaluating = _due(self._cadence.evaluate, step) or (last and self._cadence.evaluate is not None)
        if _due(self._cadence.send, step) or evaluating or last:
            self._send(step + 1)
        if evaluating:
            self._evaluate(step)
        if _due(self._cadence.save, step):
            self._save(step)
        self._go_on()

    def _go_on(self) -> None:
        if self._done + 1 < self._cadence.steps:
            self._todo.append(Action(Do.NEXT_BATCH, self._done + 1))
        else:
            self._finish()

    def _finish(self) -> None:
        if self._evaluated < self._done and self._cadence.evaluate is not None:
            self._send(self._done + 1)
            self._evaluate(self._done)
        if self._saved < self._done:
            self._save(self._done)
        self._todo.append(Action(Do.EXPORT, self._done))

    def _send(self, version: int) -> None:
        if self._cadence.send is not None:
            self._todo.append(Action(Do.SEND, version))

    def _evaluate(self, step: int) -> None:
        self._todo.append(Action(Do.EVALUATE, step))
        self._evaluated = step

    def _save(self, step: int) -> None:
        self._todo.append(Action(Do.SAVE, step))
        self._saved = step


def _due(interval: int | None, step: int) -> bool:
    return interval is not None and (step + 1) % interval == 0
