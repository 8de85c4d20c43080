"""The pages for users of slime and retrain cover every item, and the named evidence exists."""

import csv
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "docs/coming-from-slime.tsv").read_text(encoding="utf-8").splitlines()
ROWS = list(csv.DictReader(LINES, delimiter="\t", quoting=csv.QUOTE_NONE))


def test_every_item_of_the_documents_is_there_once() -> None:
    assert Counter(row["document"][:3] for row in ROWS) == {"000": 86, "001": 193, "002": 104, "003": 18}
    assert {row["state"] for row in ROWS} <= {"works", "differs", "refused", "absent"}
    assert [row["item"] for row in ROWS if row["state"] != "works" and not row["here"]] == []


@pytest.mark.parametrize("proof", sorted({row["proof"] for row in ROWS}))
def test_what_shows_it_is_there(proof: str) -> None:
    path, _, name = proof.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    assert not name or re.search(rf"def {name}\(", text)
