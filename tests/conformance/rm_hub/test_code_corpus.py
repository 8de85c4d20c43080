"""A sample of the corpus of submitted programs, for every test run; `test_corpus` runs the whole corpus nightly."""

from agentrl.rm_hub import grade_many
from agentrl.rm_hub.settings import RmHubSettings
from tests.support import corpus


def test_a_sample_of_the_programs_is_graded_as_labelled() -> None:
    items = [item for item in corpus.load("code") if item.category != "hostile"][::27]
    triples = [(item.response, item.label, item.metadata) for item in items]
    tally = corpus.Tally()
    for item, outcome in zip(items, grade_many("code", triples, settings=RmHubSettings()), strict=True):
        tally.add(item, outcome)
    assert tally.false_negatives + tally.false_positives + tally.other == []
