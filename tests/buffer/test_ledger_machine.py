"""The ledger against a model of it, with random operations, crashes, checkpoints and recoveries."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrl.buffer.ledger import Ledger, State
from agentrl.errors import LedgerError
from tests.buffer.make import finished, lease, recovered
from tests.support.audit import audit_ledger
from tests.support.nightly import examples

BATCH = 2


class LedgerMachine(RuleBasedStateMachine):
    """`model` maps a group to its state; `batches` maps a training step to its batch.

    `leased_for` and `finished_as` (rollout step, sequence number of the completion) give the order within a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "ledger.sqlite"
        self.model: dict[int, State] = {}
        self.batches: dict[int, list[int]] = {}
        self.tags: dict[int, str] = {}
        self.trained_at: dict[int, int] = {}
        self.pruned: set[int] = set()
        self.leased_for: dict[int, int] = {}
        self.finished_as: dict[int, int] = {}
        self.finishes = 0
        self.step, self.checkpoint, self.life = 0, -1, 0
        self.ledger: Ledger

    @initialize(keep=st.sampled_from(["until_checkpoint", "always"]))
    def begin(self, keep: str) -> None:
        self.keep = keep
        self.open()

    def open(self) -> None:
        self.life += 1
        self.ledger = Ledger(self.path, keep=self.keep)  # type: ignore[arg-type]

    def having(self, *states: State) -> list[int]:
        return [group for group, state in self.model.items() if state in states]

    @rule(n=st.integers(0, 4))
    def lease(self, n: int) -> None:
        waiting = sorted(self.having(State.WAITING))[:n]
        new = list(range(len(self.model), len(self.model) + n - len(waiting)))
        assert lease(self.ledger, n, self.step) == waiting + new
        self.model.update(dict.fromkeys(waiting + new, State.LEASED))
        self.leased_for.update(dict.fromkeys(waiting + new, self.step))

    @rule(data=st.data(), to=st.sampled_from([s for s in State if s not in (State.LEASED, State.TRAINED)]))
    @precondition(lambda self: self.model)
    def move(self, data: st.DataObject, to: State) -> None:
        group = data.draw(st.sampled_from(sorted(self.model)))
        tag = f"life{self.life}"
        act: Callable[[], None] = {
            State.COMPLETED: lambda: self.ledger.complete(group, finished(group, tag=tag)),
            State.WAITING: lambda: self.ledger.release(group, "given back"),
            State.DROPPED: lambda: self.ledger.drop(group, "filtered"),
        }[to]
        legal = {
            State.COMPLETED: (State.LEASED,),
            State.WAITING: (State.LEASED,),
            State.DROPPED: (State.WAITING, State.LEASED, State.COMPLETED),
        }[to]
        if self.model[group] in legal:
            act()
            self.model[group] = to
            if to is State.COMPLETED:
                self.completed(group)
            for batch in self.batches.values():
                if to is State.DROPPED and group in batch:
                    batch.remove(group)
        else:
            with pytest.raises(LedgerError):
                act()

    @rule(back=st.integers(0, 3), again=st.booleans())
    def expire(self, back: int, again: bool) -> None:
        """Expire completed groups that were leased long ago and are in no batch."""
        fixed = {group for batch in self.batches.values() for group in batch}
        old = {i for i in self.having(State.COMPLETED) if self.leased_for[i] < self.step - back} - fixed
        assert set(self.ledger.expire(self.step - back, "too old", again=again)) == old
        self.model.update(dict.fromkeys(old, State.WAITING if again else State.DROPPED))

    @rule(data=st.data())
    @precondition(lambda self: State.LEASED in self.model.values())
    def finish_some(self, data: st.DataObject) -> None:
        """Complete groups in any order, possibly long after later ones."""
        alive = sorted(self.having(State.LEASED))
        for group in data.draw(st.lists(st.sampled_from(alive), unique=True, min_size=1)):
            self.ledger.complete(group, finished(group, tag=f"life{self.life}"))
            self.model[group] = State.COMPLETED
            self.completed(group)

    def completed(self, group: int) -> None:
        self.tags[group] = f"life{self.life}"
        self.finishes += 1
        self.finished_as[group] = self.finishes

    @rule(recorded=st.booleans())
    @precondition(lambda self: list(self.model.values()).count(State.COMPLETED) >= BATCH)
    def train(self, recorded: bool) -> None:
        ids = self.ledger.assign_batch(BATCH, self.step)
        assert ids == sorted(ids, key=lambda i: (self.leased_for[i], self.finished_as[i]))
        assert set(self.batches.get(self.step, [])) <= set(ids), "a batch that was fixed must stay"
        assert all(self.model[i] is State.COMPLETED for i in ids)
        for group in ids:
            assert self.ledger.samples(group) == finished(group, tag=self.tags[group])
        self.batches[self.step] = ids
        if len(ids) < BATCH:
            return
        assert len(ids) == BATCH
        if not recorded:
            self.killed_after_the_checkpoint(ids)
            return
        self.ledger.mark_trained(ids, self.step)
        with pytest.raises(LedgerError):
            self.ledger.mark_trained(ids[:1], self.step)
        self.model.update(dict.fromkeys(ids, State.TRAINED))
        self.trained_at.update(dict.fromkeys(ids, self.step))
        self.step += 1

    def killed_after_the_checkpoint(self, ids: list[int]) -> None:
        """Recover with the checkpoint of this step on disk, and no record in the ledger that the step was trained."""
        self.model.update(dict.fromkeys(ids, State.TRAINED))
        self.trained_at.update(dict.fromkeys(ids, self.step))
        self.checkpoint = self.step
        self.step += 1
        self.crash_and_recover(0)

    @rule(on_record=st.booleans())
    @precondition(lambda self: self.step - 1 > self.checkpoint)
    def save_checkpoint(self, on_record: bool) -> None:
        # A kill between the checkpoint's own write and this record must not matter.
        self.checkpoint = self.step - 1
        if on_record:
            self.ledger.checkpointed(self.checkpoint)
            if self.keep == "until_checkpoint":
                self.pruned |= {i for i in self.having(State.TRAINED) if self.trained_at[i] <= self.checkpoint}

    @rule(back=st.sampled_from([0, 0, 1, 2]))
    def crash_and_recover(self, back: int) -> None:
        """Stop at any point; resume from the newest checkpoint or an older one."""
        self.ledger.close()
        self.open()
        checkpoint = max(-1, self.checkpoint - back)
        if self.model:
            with pytest.raises(LedgerError, match="call recover"):
                lease(self.ledger, 1, self.step)
        moved = recovered(self.ledger, None if checkpoint < 0 else checkpoint)
        late = {i for i in self.having(State.TRAINED) if self.trained_at[i] > checkpoint}
        released = self.having(State.LEASED)
        assert set(moved.get("the run stopped", ())) == set(released)
        gone, stored = late & self.pruned, {*self.having(State.COMPLETED), *(late - self.pruned)}
        first = min((self.trained_at[i] for i in gone), default=self.step)
        dead = {i for i in stored if gone and self.leased_for[i] > first}
        assert set(moved.get("samples pruned", ())) == gone, "samples go only under a checkpoint"
        assert set(moved.get("weights of an earlier process", ())) == dead
        assert set(moved.get("after the checkpoint", ())) == late - gone
        self.pruned -= late
        if gone:
            self.batches = {step: batch for step, batch in self.batches.items() if step <= first}
        self.model.update(dict.fromkeys(late, State.COMPLETED))
        self.model.update(dict.fromkeys([*gone, *dead, *released], State.WAITING))
        for batch in self.batches.values():
            batch[:] = [i for i in batch if i not in gone | dead]
        self.step, self.checkpoint = checkpoint + 1, checkpoint

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "ledger"):
            return
        counts = self.ledger.counts()
        assert counts == {state: len(self.having(state)) for state in State}
        assert len(self.ledger) == len(self.model)
        report = audit_ledger(self.path, through_step=self.step - 1, groups_per_step=BATCH)
        assert report.ok, report.problems
        assert report.trained_by_step == dict.fromkeys(range(self.step), BATCH)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
        shutil.rmtree(self.folder)


LedgerMachine.TestCase.settings = settings(
    max_examples=examples(0.4),
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestLedgerMachine = LedgerMachine.TestCase
