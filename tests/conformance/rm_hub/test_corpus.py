"""Every grader on its corpus of labelled answers: known readings stay right."""

from collections.abc import Callable

import pytest

from agentrl.errors import GraderFailure
from agentrl.rm_hub import Grade, grade, grade_many
from tests.support import corpus
from tests.support.nightly import nightly

LEAST = 150


def graded(name: str, item: corpus.Item) -> Grade | GraderFailure:
    try:
        return grade(name, item.response, item.label, item.metadata)
    except GraderFailure as failure:
        return failure


def check(
    items: list[corpus.Item], outcomes: list[Grade | GraderFailure], record: Callable[[str, object], None]
) -> None:
    tally = corpus.Tally()
    for item, outcome in zip(items, outcomes, strict=True):
        tally.add(item, outcome)
    told = tally.false_negatives + tally.false_positives + tally.other
    record("known_errors", tally.known)
    unknown = [line for line in told if "(known: " not in line]
    assert not unknown, f"{len(unknown)} of {len(items)}:\n" + "\n".join(unknown[:20])
    assert not tally.fixed, f"no longer errors, remove known_error: {tally.fixed}"


PARTS = [(name, part) for name in corpus.names("process") for part in range(4 if name == "math" else 1)]


@pytest.mark.parametrize(("name", "part"), nightly(PARTS, [each for each in PARTS if each[1] == 0]))
def test_every_item_is_graded_as_labelled(name: str, part: int, record_property: Callable[[str, object], None]) -> None:
    """The corpus of mathematics has four parts; three of them are graded only nightly."""
    items = corpus.load(name)[part :: 4 if name == "math" else 1]
    check(items, [graded(name, item) for item in items], record_property)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", corpus.names("async"))
def test_every_item_is_graded_as_labelled_by_graders_that_wait(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    items = corpus.load(name)
    triples = [(item.response, item.label, item.metadata) for item in items]
    check(items, grade_many(name, triples), record_property)


@pytest.mark.parametrize("name", [*corpus.names("process"), *corpus.names("async")])
def test_the_corpus_is_large_and_has_both_kinds(name: str) -> None:
    items = corpus.load(name)
    assert len(items) >= LEAST
    assert len({item.id for item in items}) == len(items)
    refused = sum(not item.correct for item in items)
    assert refused >= len(items) / 3
    assert len(items) - refused >= 30
    assert all(isinstance(item.response, str) and isinstance(item.correct, bool) for item in items)
