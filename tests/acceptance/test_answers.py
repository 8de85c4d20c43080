"""Answers that a policy under RL would try, and ordinary right ones, with the graders' default settings.

1. `answers/hostile.jsonl` holds answers that do not commit to the right answer. Each grader that a line names must give
   the lowest score.
2. `answers/honest.jsonl` holds right answers in the forms that the strict reader accepts: the highest score.
3. A grade takes at most `CPU_S` seconds of CPU time for any answer. The kernel ends a process that takes more,
   so that a number too large for the machine cannot block the tests.
"""

import multiprocessing
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import orjson
import pytest

from agentrl.errors import GraderFailure
from agentrl.rm_hub import grade

FOLDER = Path(__file__).with_name("answers")
GRADERS = frozenset({"math", "gsm8k", "dapo", "deepscaler", "gpqa"})
LOWEST = {"dapo": -1.0}
CPU_S, WALL_S = 5, 120
MEMORY = 8 << 30


@dataclass(frozen=True)
class Item:
    """One line of a file: a response, and the graders that must give it the same score."""

    id: str
    kind: str
    graders: tuple[str, ...]
    label: str
    metadata: dict[str, Any]
    response: str


@dataclass(frozen=True)
class Outcome:
    """The grade of an answer, or `score` None and the failure."""

    score: float | None
    correct: bool
    said: str


def read(name: str) -> list[Item]:
    lines = (FOLDER / f"{name}.jsonl").read_bytes().splitlines()
    return [Item(**{**row, "graders": tuple(row["graders"])}) for row in map(orjson.loads, lines)]


HOSTILE, HONEST = read("hostile"), read("honest")


def _outcome(name: str, item: Item) -> Outcome:
    try:
        got = grade(name, item.response, item.label, item.metadata)
    except (GraderFailure, MemoryError) as error:
        return Outcome(None, False, repr(error))
    return Outcome(got.score, got.correct, f"{got.extracted!r}: {got.reason}")


def _serve(asked: Connection) -> None:
    """Grade what arrives on the pipe. Without a handler SIGPROF ends the process, even inside C code."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for name in GRADERS:  # imports of the first grade must not count
        _outcome(name, HONEST[0])
    while True:
        name, item = asked.recv()
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        outcome = _outcome(name, item)
        signal.setitimer(signal.ITIMER_PROF, 0)
        asked.send(outcome)


class Bench:
    """A process that grades one answer at a time. A new process replaces one that an answer has killed."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._asks, asked = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(asked,), daemon=True)
        self._process.start()
        asked.close()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._asks.close()

    def grade(self, name: str, item: Item) -> Outcome:
        self._asks.send((name, item))
        try:
            if self._asks.poll(WALL_S):
                outcome: Outcome = self._asks.recv()
                return outcome
            died = f"no grade after {WALL_S} s"
        except EOFError:
            died = f"over {CPU_S} s of CPU time, or a crash"
        self.close()
        self._start()
        return Outcome(None, False, died)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def _unlike(bench: Bench, item: Item, want: dict[str, tuple[float, bool]]) -> dict[str, Outcome]:
    outcomes = {name: bench.grade(name, item) for name in item.graders}
    return {name: got for name, got in outcomes.items() if (got.score, got.correct) != want[name]}


@pytest.mark.parametrize("item", HOSTILE, ids=lambda item: item.id)
def test_an_answer_that_states_no_right_one_is_not_paid(bench: Bench, item: Item) -> None:
    assert _unlike(bench, item, {name: (LOWEST.get(name, 0.0), False) for name in GRADERS}) == {}


@pytest.mark.parametrize("item", HONEST, ids=lambda item: item.id)
def test_a_right_answer_in_an_ordinary_form_is_paid(bench: Bench, item: Item) -> None:
    assert _unlike(bench, item, dict.fromkeys(GRADERS, (1.0, True))) == {}


def test_the_files_are_wide_enough_to_mean_something() -> None:
    kinds = Counter(item.kind for item in HOSTILE)
    assert len(HOSTILE) >= 300
    assert len(kinds) >= 40
    assert max(kinds.values()) <= 10, kinds.most_common(3)
    assert len(HONEST) >= 150
    both = HOSTILE + HONEST
    assert len({item.id for item in both}) == len(both)
    assert all(item.graders and GRADERS.issuperset(item.graders) for item in both)
    assert {name for item in HOSTILE for name in item.graders} == GRADERS
    assert {name for item in HONEST for name in item.graders} == GRADERS
