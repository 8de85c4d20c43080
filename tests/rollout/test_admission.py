"""Admission: how many groups may start and when a batch is full, over random schedules and without an event loop."""

import heapq
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rollout import admission
from agentrl.rollout.admission import WINDOW, Admission
from tests.support.nightly import examples


@dataclass
class Run:
    """A run with an admission: groups finish in random order, every fourth as late as possible, and steps take time."""

    admission: Admission
    interval: int
    rng: random.Random
    drop: float = 0.0
    playing: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)
    trained: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ages: list[int] = field(default_factory=list)
    stale: list[int] = field(default_factory=list)
    most: int = 0
    made: int = 0

    def run(self, steps: int) -> None:
        for step in range(steps):
            self._batch(step)
            self._play(self.rng.randrange(4))
            if (step + 1) % self.interval == 0:
                self.admission.updated(step + 1)
            self._play(self.rng.randrange(4))

    def _batch(self, step: int) -> None:
        a = self.admission
        a.begin(step)
        for number in [n for n, version in self.kept.items() if version < a.oldest]:
            del self.kept[number]
            self.stale.append(number)
        self._wait()
        self._start()
        while not a.full:
            assert self.playing, "nothing is in play and the batch is not full: a deadlock"
            self._play(1)
        chosen = sorted(self.kept, key=lambda n: (self.kept[n], n))[: a.batch]
        self.trained[step] = tuple(chosen)
        self.ages += [step - self.kept.pop(number) for number in chosen]
        a.handed()
        self._wait()
        for number in [n for n, version in self.playing.items() if a.stale(version)]:
            self._end(number, None)

    def _start(self) -> None:
        a = self.admission
        for _ in range(a.wanted):
            self.playing[self.made] = a.started()
            self.made += 1
        assert a.busy <= a.places + a.size - 1
        self.most = max(self.most, len(self.playing) + len(self.kept))

    def _play(self, groups: int) -> None:
        for _ in range(min(groups, len(self.playing))):
            quick = [number for number in self.playing if number % 4] or list(self.playing)
            self._end(self.rng.choice(quick), self.rng.random() >= self.drop)
            self._start()

    def _end(self, number: int, keep: bool | None) -> None:
        version = self.playing.pop(number)
        for _ in range(self.admission.size):
            self.admission.ended()
        self.admission.finished(version, keep=keep)
        if keep:
            self.kept[number] = version
        elif keep is None:
            self.stale.append(number)

    def _wait(self) -> None:
        self.admission.wait(Counter(self.kept.values()))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    interval = draw(st.integers(1, 3))
    staleness = draw(st.integers(interval - 1, 6))
    steps, size = draw(st.integers(1, 30)), draw(st.integers(1, 4))
    batch, between = draw(st.integers(1, 6)), draw(st.booleans()) and staleness > 0
    admission = Admission(
        batch,
        draw(st.sampled_from([0, 0, 1, 5])),
        staleness,
        places=draw(st.integers(1, 40)),
        size=size,
        steps=steps,
        between=between,
    )
    admission.held = draw(st.integers(0, admission.held))
    return Run(admission, interval, random.Random(draw(st.integers(0, 2**16))), draw(st.sampled_from([0.0, 0.3])))


@settings(max_examples=examples(3), deadline=None)
@given(runs())
def test_any_schedule_ends_with_whole_batches_none_too_old_none_twice_none_lost(run: Run) -> None:
    a, steps = run.admission, run.admission.steps or 0
    run.run(steps)
    assert [len(run.trained[step]) for step in range(steps)] == [a.batch] * steps
    used = [number for batch in run.trained.values() for number in batch]
    assert len(set(used)) == len(used)
    assert all(0 <= age <= a.staleness for age in run.ages)
    fates = Counter([*used, *run.kept, *run.playing, *run.stale])
    assert max(fates.values()) == 1
    if not a.surplus:
        assert not run.stale, "without surplus nothing is given up"
        if not run.drop:
            assert not run.playing, "nothing is started for batches after the last"
            assert not run.kept
            assert set(fates) == set(range(run.made))
    assert run.most <= (a.staleness + 1) * a.batch + a.surplus


@settings(max_examples=examples(1), deadline=None)
@given(runs())
def test_tokens_that_are_masked_when_old_make_no_group_too_old_to_play_on(run: Run) -> None:
    run.admission.ageless = True
    run.run(run.admission.steps or 0)
    assert [len(batch) for batch in run.trained.values()] == [run.admission.batch] * (run.admission.steps or 0)
    assert not any(run.admission.stale(version) for version in range(-9, 9))


def test_staleness_0_plays_nothing_between_batches_and_over_samples() -> None:
    a = Admission(2, 1, 0)
    assert a.wanted == 0
    a.begin(0)
    assert a.wanted == 3
    versions = [a.started() for _ in range(3)]
    a.finished(versions[0], keep=True)
    assert (a.full, a.wanted) == (False, 0)
    a.finished(versions[1], keep=True)
    assert (a.full, a.wanted) == (True, 0)
    a.handed()
    assert a.wanted == 0
    assert a.stale(versions[2])


@pytest.mark.parametrize(("surplus", "scarce"), [(0, True), (1, False)])
def test_groups_are_scarce_if_none_is_beyond_the_batch(surplus: int, scarce: bool) -> None:
    a = Admission(2, surplus, 0)
    a.begin(0)
    for version in [a.started() for _ in range(a.wanted)][:1]:
        a.finished(version, keep=True)
    assert a.scarce is scarce


def test_staleness_1_plays_the_next_batch_while_one_is_trained() -> None:
    a = Admission(2, 0, 1, between=True)
    a.begin(0)
    assert a.wanted == 4
    versions = [a.started() for _ in range(4)]
    for version in versions[:2]:
        a.finished(version, keep=True)
    assert a.full
    a.handed()
    a.wait(Counter())
    assert a.wanted == 0, "what is in play is all that the next batch may train before the weights are newer"
    a.updated(1)
    assert a.wanted == 2


def test_a_batch_waits_for_groups_that_later_ones_could_not_take() -> None:
    a = Admission(1, 0, 2, between=True)
    a.begin(0)
    for _ in range(3):
        a.started()
    a.finished(0, keep=True)
    assert a.full
    a.handed()
    a.wait(Counter())
    a.updated(1)
    a.begin(1)
    a.finished(a.started(), keep=True)
    assert not a.full, "two groups of version 0 are in play, and only batch 2 would be left for them"
    a.finished(0, keep=True)
    assert a.full


def test_places_bound_the_trajectories_in_play() -> None:
    a = Admission(8, 0, 0, places=10, size=4)
    a.begin(0)
    assert a.wanted == 3
    for _ in range(3):
        a.started()
    assert a.wanted == 0
    a.ended()
    a.ended()
    assert a.wanted == 0
    a.ended()
    assert a.wanted == 1


def test_only_drops_in_a_row_are_hopeless() -> None:
    a = Admission(6)
    a.begin(0)
    for keep in [False] * 59 + [True] + [False] * 59 + [None]:
        assert not a.hopeless
        a.finished(a.started(), keep=keep)
    a.finished(a.started(), keep=False)
    assert a.hopeless
    a.begin(1)
    assert not a.hopeless


@pytest.mark.parametrize("steps", [1, 3])
def test_nothing_is_started_for_batches_after_the_last(steps: int) -> None:
    a = Admission(2, 0, 5, steps=steps, between=True)
    a.held = 0
    a.begin(0)
    assert a.wanted == 2 * steps


# ---- holding back ---------------------------------------------------------------------------------------------------


def timed(
    a: Admission, seconds: Callable[[int], float], training: float, steps: int, interval: int = 1
) -> tuple[float, list[int]]:
    """Play a run in simulated time: group n takes `seconds(n)`, a step `training`. Returns seconds and stalenesses."""
    now, made, ages = 0.0, 0, list[int]()
    playing, kept = list[tuple[float, int]](), list[int]()

    def start() -> None:
        nonlocal made
        for _ in range(a.wanted):
            heapq.heappush(playing, (now + seconds(made), a.started()))
            made += 1

    def finish() -> None:
        nonlocal now
        now, version = heapq.heappop(playing)
        a.ended()
        a.finished(version, keep=True)
        kept.append(version)
        start()

    for step in range(steps):
        a.updated(step - step % interval)
        start()
        a.begin(step)
        start()
        while not a.full:
            finish()
        kept.sort()
        ages += [step - version for version in kept[: a.batch]]
        del kept[: a.batch]
        a.handed()
        a.wait(Counter(kept))
        trained = now + training
        start()
        while playing and playing[0][0] <= trained:
            finish()
        now = trained
    return now, ages


def pareto(number: int) -> float:
    return min(20.0, 0.3 * random.Random(number).paretovariate(1.5))


def exponential(number: int) -> float:
    return random.Random(number).expovariate(1)


def steady(_: int) -> float:
    return 1.0


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[float, list[int]]]:
    """Return `timed` with an admission that never delays a group."""

    def play(a: Admission, *arguments: Any) -> tuple[float, list[int]]:
        a.held = 0
        with monkeypatch.context() as patch:
            patch.setattr(admission, "WINDOW", 1_000_000)
            return timed(a, *arguments)

    return play


def run_of(staleness: int = 4) -> Admission:
    return Admission(8, 0, staleness, places=12, between=True)


STEPS = 7 * WINDOW


def faster_than_training(engines: float, seconds: Callable[[int], float]) -> float:
    """Return the seconds of a training step for which fully loaded engines are `engines` times as fast."""
    return engines * 8 / 12 * statistics.fmean(map(seconds, range(1000)))


@pytest.mark.parametrize("seconds", [steady, exponential, pareto])
def test_faster_engines_start_groups_late_and_the_trainer_does_not_wait(
    seconds: Callable[[int], float], eager: Callable[..., tuple[float, list[int]]]
) -> None:
    training = faster_than_training(2, seconds)
    early, before = eager(run_of(), seconds, training, STEPS)
    late, after = timed(run_of(), seconds, training, STEPS)
    assert late <= early / 0.97
    assert statistics.fmean(before) >= 3.5
    assert statistics.fmean(after) <= 0.6 * statistics.fmean(before)


@pytest.mark.parametrize("interval", [2, 3])
def test_no_start_waits_for_an_update_that_comes_later(
    interval: int, eager: Callable[..., tuple[float, list[int]]]
) -> None:
    training = faster_than_training(2, exponential)
    early, before = eager(run_of(), exponential, training, STEPS, interval)
    late, after = timed(run_of(), exponential, training, STEPS, interval)
    assert late <= early + 5 * training, "a run pays only while it learns how many groups it needs"
    assert sum(after) < 0.85 * sum(before)


@pytest.mark.parametrize("seconds", [steady, exponential, pareto])
def test_slower_engines_get_the_groups_that_they_need(
    seconds: Callable[[int], float], eager: Callable[..., tuple[float, list[int]]]
) -> None:
    training = faster_than_training(0.7, seconds)
    early, _ = eager(run_of(), seconds, training, STEPS)
    late, _ = timed(run_of(), seconds, training, STEPS)
    assert late <= early / 0.97


def test_engines_that_become_slower_get_their_groups_back(eager: Callable[..., tuple[float, list[int]]]) -> None:
    def seconds(number: int) -> float:
        return exponential(number) * (1 if number < 4 * WINDOW * 8 else 6)

    a, training = run_of(), faster_than_training(2, exponential)
    early, _ = eager(run_of(), seconds, training, STEPS)
    late, _ = timed(a, seconds, training, STEPS)
    assert late <= early / 0.97
    assert a.held == 0


def test_staleness_1_delays_no_group(eager: Callable[..., tuple[float, list[int]]]) -> None:
    assert timed(run_of(1), exponential, 5.0, STEPS) == eager(run_of(1), exponential, 5.0, STEPS)


@settings(max_examples=examples(1), deadline=None)
@given(runs(), st.lists(st.floats(0, 1000), min_size=1), st.floats(0, 1000))
def test_batches_are_filled_whatever_the_durations(run: Run, seconds: list[float], training: float) -> None:
    a = run.admission
    a.size, a.surplus = 1, 0
    _, ages = timed(a, lambda number: seconds[number % len(seconds)], training, a.steps or 0, run.interval)
    assert len(ages) == a.batch * (a.steps or 0)
    assert all(0 <= age <= a.staleness for age in ages)
    assert 0 <= a.held <= max(0, a.staleness - 1) * a.batch
