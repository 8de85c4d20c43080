"""Simulate the bound of `benchmarks.async_gain`: the same trajectories by the same rules, without overhead of agentrl.

1. A group may start while fewer than (trained + S + 1) x batch groups have started and a slot is free. Its trajectories
   take slots in order. Step n takes the oldest finished groups. It starts once a batch of groups is finished and later
   batches can take every older group within S rollouts. Training takes a fixed time, then the weights are new.
   The bound starts every group as early as allowed; a run that needs a group later starts it later.
2. With `partial` the engine pauses while the trainer trains; tools continue.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.slow_tools import TOKEN_SECONDS, TURNS, tool_seconds, turn_tokens

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a run. Slots are trajectories in flight; a batch is counted in groups."""

    staleness: int
    partial: bool = False
    train_seconds: float = 0.0
    scale: float = 1.0
    slots: int = 128
    batch: int = 16
    group: int = 8


@dataclass(slots=True)
class Played:
    """The result of a run: when each training step and each trajectory began and ended."""

    trainings: list[Span] = field(default_factory=list)
    trajectories: list[Span] = field(default_factory=list)


@dataclass(slots=True)
class _Trajectory:
    group: "_Group"
    phases: Iterator[tuple[bool, float]]
    began: float
    engine: bool = False
    left: float = 0.0
    since: float = 0.0
    event: int = -1


@dataclass(slots=True)
class _Group:
    number: int
    missing: int
    version: int


def phases(index: int, scale: float) -> Iterator[tuple[bool, float]]:
    """Yield the phases of a trajectory in order: true if the engine works, and the seconds."""
    for turn in range(1, TURNS + 1):
        yield True, scale * TOKEN_SECONDS * turn_tokens(index, turn)
        yield False, scale * tool_seconds(index, turn)


class _Simulation:
    def __init__(self, load: Load, steps: int) -> None:
        self.load, self._steps, self.now, self.played = load, steps, 0.0, Played()
        self._events: list[tuple[float, int, _Trajectory | None]] = []
        self._count = 0
        self._waiting: deque[tuple[_Group, int]] = deque()
        self._live: dict[int, _Trajectory] = {}
        self._flying: dict[int, _Group] = {}
        self._finished: list[_Group] = []
        self._admitted = self._trained = self._handed = 0
        self._training: float | None = None

    def run(self) -> Played:
        self._go_on()
        while len(self.played.trainings) < self._steps:
            self.now, number, trajectory = heapq.heappop(self._events)
            if trajectory is None:
                assert self._training is not None
                self.played.trainings.append((self._training, self.now))
                self._training, self._trained = None, self._trained + 1
                if self.load.partial:
                    for held in self._live.values():
                        if held.engine:
                            self._schedule(held)
            elif trajectory.event == number:
                self._next_phase(trajectory)
            self._go_on()
        return self.played

    @property
    def _held(self) -> bool:
        return self.load.partial and self._training is not None

    def _go_on(self) -> None:
        """Start everything that may start now."""
        if self._training is None and self._ready():
            self._finished.sort(key=lambda group: (group.version, group.number))
            del self._finished[: self.load.batch]
            self._handed += 1
            self._training = self.now
            if self.load.partial:
                for live in self._live.values():
                    if live.engine:
                        live.left -= self.now - live.since
                        live.event = -1
            self._push(self.now + self.load.train_seconds, None)
        while not self._held and len(self._live) < self.load.slots and (self._waiting or self._admit()):
            group, index = self._waiting.popleft()
            trajectory = _Trajectory(group, phases(index, self.load.scale), self.now)
            self._live[id(trajectory)] = trajectory
            self._next_phase(trajectory)

    def _ready(self) -> bool:
        """Return true if a batch is finished and the later batches can take every older group before it is too old."""
        return len(self._finished) >= self.load.batch and all(
            map(self._in_time, {g.version for g in self._flying.values()})
        )

    def _in_time(self, version: int) -> bool:
        flying = sum(group.version <= version for group in self._flying.values())
        left = max(0, sum(group.version <= version for group in self._finished) - self.load.batch)
        return flying + left <= (version + self.load.staleness - self._handed) * self.load.batch

    def _admit(self) -> bool:
        if self._admitted >= (self._trained + self.load.staleness + 1) * self.load.batch:
            return False
        group = _Group(self._admitted, self.load.group, self._trained)
        self._flying[group.number] = group
        first = self._admitted * self.load.group
        self._waiting.extend((group, index) for index in range(first, first + self.load.group))
        self._admitted += 1
        return True

    def _next_phase(self, trajectory: _Trajectory) -> None:
        if (phase := next(trajectory.phases, None)) is not None:
            trajectory.engine, trajectory.left = phase
            if trajectory.engine and self._held:
                trajectory.event = -1
            else:
                self._schedule(trajectory)
            return
        del self._live[id(trajectory)]
        self.played.trajectories.append((trajectory.began, self.now))
        group = trajectory.group
        group.missing -= 1
        if not group.missing:
            self._finished.append(self._flying.pop(group.number))

    def _schedule(self, trajectory: _Trajectory) -> None:
        trajectory.since = self.now
        trajectory.event = self._push(self.now + trajectory.left, trajectory)

    def _push(self, at: float, what: _Trajectory | None) -> int:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, what))
        return self._count


def bound(load: Load, steps: int) -> Played:
    """Simulate the first `steps` steps of a longer run that spends time only in tools, engine and training."""
    return _Simulation(load, steps).run()


def synchronous_seconds(load: Load, steps: int = 100) -> float:
    """Return the mean seconds of a synchronous rollout of this load."""
    return (
        bound(Load(0, scale=load.scale, slots=load.slots, batch=load.batch, group=load.group), steps).trainings[-1][1]
        / steps
    )


def share(spans: Iterable[Span], window: Span, of: int = 1) -> float:
    """Return the share of `window`, times `of`, that the spans cover."""
    begin, end = window
    covered = sum(max(0.0, min(last, end) - max(first, begin)) for first, last in spans)
    return covered / (of * (end - begin))


def window(trainings: Sequence[Span], warm: int) -> Span:
    """Return the span from the end of training step `warm` to the end of the last one."""
    return trainings[warm - 1][1], trainings[-1][1]
