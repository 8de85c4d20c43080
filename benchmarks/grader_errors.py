"""How often the graders are wrong on the labelled answers of tests/conformance/rm_hub.

    python -m benchmarks.grader_errors [GRADER...] [--all]

Prints the table of docs/graders.md, and with --all each error. A false negative is a right answer that was refused, a
false positive a wrong one that was accepted; a failure or a wrong score counts as "other". `code` needs the sandbox.
"""

import sys

from agentrl.rm_hub import grade_many
from tests.support import corpus


def main() -> None:
    chosen = [name for name in sys.argv[1:] if not name.startswith("-")]
    names = chosen or [*corpus.names("process"), *corpus.names("async")]
    told: list[str] = []
    print("| grader | right answers | false negatives | wrong answers | false positives | other |")
    print("|---|---|---|---|---|---|")
    for name in names:
        items = corpus.load(name)
        tally = corpus.Tally()
        outcomes = grade_many(name, [(item.response, item.label, item.metadata) for item in items], timeout=60.0)
        for item, outcome in zip(items, outcomes, strict=True):
            tally.add(item, outcome)
        negative, positive = len(tally.false_negatives), len(tally.false_positives)
        print(
            f"| `{name}` | {tally.right} | {negative} | {tally.wrong} | {positive} | {len(tally.other)} |", flush=True
        )
        told += [f"{name} {line}" for line in tally.false_negatives + tally.false_positives + tally.other]
    if "--all" in sys.argv:
        print("\n".join(told))


if __name__ == "__main__":
    main()
