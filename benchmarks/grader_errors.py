"""Error rates of the graders on answers that others published, beside two simpler readers.

    python -m benchmarks.foreign_answers DIR
    python -m benchmarks.grader_errors DIR/*.jsonl.gz [--all]

Prints the table of docs/graders.md: for each source how many right answers each reader refused, and how many wrong
answers it paid. `--all` lists each error. An answer without a verdict is right or wrong if all readers agree. If they
disagree, the answer is printed and not counted, so that someone can add a verdict (see `benchmarks.foreign_answers`).
"""

import gzip
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import GraderFailure
from agentrl.rm_hub import Grade, grade_many

READERS = ("agentrl strict", "agentrl lenient", "small reader", "math_verify alone")
AVAILABLE = {"math": 4, "gsm8k": 4, "gpqa": 3}
"""How many readers support a grader: math_verify reads no choices, and other graders have only the first reader."""


@dataclass(frozen=True)
class Read:
    """One answer, and the verdict of each reader: None if the reader does not support the answer's grader."""

    row: dict[str, Any]
    paid: tuple[bool | None, ...]

    @property
    def right(self) -> bool | None:
        """Return true if the answer is right; None without a published verdict if the readers disagree."""
        said = {paid for paid in self.paid if paid is not None}
        published: bool | None = self.row["right"]
        return published if published is not None else said.pop() if len(said) == 1 else None


def rows(path: str) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else open(path, encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def paid(rm_type: str, answers: Sequence[dict[str, Any]], more: dict[str, str]) -> list[bool]:
    items = [(row["response"], row["label"], row["metadata"] | more) for row in answers]
    return [
        bool(got.correct) if isinstance(got, Grade) else failed(got) for got in grade_many(rm_type, items, timeout=30.0)
    ]


def failed(failure: GraderFailure) -> bool:
    """Return false for a failure, and print it."""
    print(f"failure: {failure}", file=sys.stderr)
    return False


def read(answers: Sequence[dict[str, Any]]) -> list[Read]:
    """Return the verdicts of the readers on answers to one grader."""
    name = answers[0]["grader"]
    asked: list[tuple[str, dict[str, str]]] = [
        (name, {}),
        (name, {"reader": "lenient"}),
        (f"benchmarks/small_reader.py:{name}", {}),
        (f"benchmarks/math_verify_alone.py:{name}", {}),
    ]
    columns: list[Sequence[bool | None]] = [paid(to, answers, more) for to, more in asked[: AVAILABLE.get(name, 1)]]
    columns += [[None] * len(answers)] * (len(READERS) - len(columns))
    return [Read(row, each) for row, each in zip(answers, zip(*columns, strict=True), strict=True)]


def line(source: str, grader: str, answers: Sequence[Read]) -> str:
    """Return one line of the table."""
    cells = [source, f"`{grader}`"]
    for right in (True, False):
        known = [one for one in answers if one.right is right]
        wrongly = Counter(at for one in known for at, got in enumerate(one.paid) if got is (not right))
        cells.append(f"{len(known):,}")
        cells += [f"{wrongly[at]:,}" if at < AVAILABLE.get(grader, 1) else "" for at in range(len(READERS))]
    return f"| {' | '.join(cells)} |"


def errors(answers: Sequence[Read]) -> Iterator[str]:
    """Yield the errors of each reader, and the answers without a verdict."""
    for one in answers:
        where = f"{one.row['source']} {one.row['id']}, label {one.row['label']!r}: ...{one.row['response'][-200:]!r}"
        if one.right is None:
            yield f"undecided: {where}"
        for reader, got in zip(READERS, one.paid, strict=True):
            if one.right is not None and got is (not one.right):
                yield f"{reader} {'paid' if got else 'refused'}: {where}"


def main() -> None:
    answers: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for path in (name for name in sys.argv[1:] if not name.startswith("-")):
        for row in rows(path):
            answers[row["grader"], row["source"]].append(row)
    readers = " | ".join(READERS)
    print(f"| answers | grader | right | {readers} | wrong | {readers} |")
    print("|" + "---|" * (4 + 2 * len(READERS)))
    done: dict[str, list[Read]] = defaultdict(list)
    for (grader, source), group in sorted(answers.items()):
        found = read(group)
        done[grader] += found
        print(line(source, grader, found), flush=True)
    for grader, found in done.items():
        print(line("**all**", grader, found))
    told = [text for found in done.values() for text in errors(found)]
    if undecided := sum(text.startswith("undecided") for text in told):
        print(f"{undecided} answers without a verdict on which the readers differ are not counted", file=sys.stderr)
    if "--all" in sys.argv:
        print("\n".join(sorted(told)))


if __name__ == "__main__":
    main()
