"""Check how the code grader judges published solutions, and programs that solve something else.

    python -m benchmarks.published_programs [--right] HumanEval.jsonl.gz mbpp.jsonl LeetCodeDataset-v0.3.1-test.jsonl.gz ...

The files are those of github.com/openai/human-eval (data/), github.com/google-research/google-research (mbpp/) and
github.com/newfacade/LeetCodeDataset (data/), as JSONL, gzipped or not, or a JSON list. Of each item are scored: the
published solution, also as a method of class Solution and without its imports, which must get 1. Its functions
returning None, and the next item's solution under this item's name, must get 0 unless the tests accept them
(`--right` skips both). LeetCode's solutions are scored as its site takes them, without imports: once with the preamble
of the data set, which defines ListNode and TreeNode, and once without. Then twenty programs print 1 to 5 MB each.
Prints counts for each file, and each item with an unexpected score and its reason.
"""

import ast
import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.errors import GraderFailure
from agentrl.rm_hub import RmHubSettings, grade_many

_WRONG = ("returning None", "another item's solution")
"""Kinds of programs that must score 0."""
_SETTINGS = RmHubSettings(code_test_timeout=120, code_timeout=240)
"""Limits that hold on a busy machine: speed is not measured."""


class Item(NamedTuple):
    """A published problem: its name, solution, the tested function, and tests in the grader's form."""

    name: str
    solution: str
    entry: str
    label: dict[str, Any]


def read(path: Path) -> Iterator[Item]:
    """Yield the items of a file of HumanEval, MBPP or LeetCodeDataset."""
    text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    rows = json.loads(text) if text.lstrip().startswith("[") else map(json.loads, text.splitlines())
    for row in rows:
        if "completion" in row:
            label = {"test": row["test"], "entry_point": row["entry_point"], "preamble": row["prompt"]}
            yield Item(row["task_id"], row["completion"], row["entry_point"], label)
        elif "canonical_solution" in row:
            yield Item(row["task_id"], row["prompt"] + row["canonical_solution"], row["entry_point"], row)
        else:
            yield Item(f"MBPP/{row['task_id']}", row["code"], _tested(row["code"], row["test_list"]), row)


def stub(item: Item) -> str:
    """Return the solution with each function's body replaced by `return None`."""
    tree = ast.parse(item.solution)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = [ast.Return(ast.Constant(None))]
    return ast.unparse(ast.fix_missing_locations(tree))


def other(item: Item, neighbour: Item) -> str:
    """Return another item's solution under this item's name."""
    return f"{neighbour.solution}\n\n{item.entry} = {neighbour.entry}\n"


def in_class(item: Item) -> str:
    """Return the solution in LeetCode's form: its tested function is a method of class Solution. Imports are removed
    except those under another name (`heapq as hq`)."""
    tree = ast.parse(item.solution)
    body = [n for n in tree.body if not isinstance(n, ast.Import | ast.ImportFrom) or any(a.asname for a in n.names)]
    method = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == item.entry)
    method.args.args.insert(0, ast.arg("self"))
    renamed = ast.parse(f"def {item.entry}(*args): return Solution().{item.entry}(*args)").body
    (holder,) = ast.parse("class Solution: pass").body
    assert isinstance(holder, ast.ClassDef)
    holder.body = [method]
    made = ast.Module([*(node for node in body if node is not method), holder, *renamed], [])
    return ast.unparse(ast.fix_missing_locations(made))


def _tested(code: str, tests: list[str]) -> str:
    """Return the last function of the solution that the tests call."""
    names = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if any(f"{name}(" in test.replace(" (", "(") for test in tests)][-1]


def large_outputs() -> Iterator[Item]:
    """Return programs that print, and functions that return, one to five megabytes."""
    for mega in range(1, 6):
        count = mega * 145_000
        numbers, word = list(range(count)), "ab c" * (mega * 262_144)
        lines = "\n".join(map(str, numbers))
        yield Item(f"lines, {mega} MB", f"for n in range({count}):\n    print(n)", "", _printed(lines))
        yield Item(f"one line, {mega} MB", f"print(*range({count}))", "", _printed(lines.replace("\n", " ")))
        yield Item(f"list, {mega} MB", "def f(n): return list(range(n))", "f", _called(count, numbers))
        yield Item(f"text, {mega} MB", "def f(n): return 'ab c' * n", "f", _called(len(word) // 4, word))


def _printed(output: str) -> dict[str, Any]:
    return {"inputs": [""], "outputs": [output]}


def _called(argument: int, value: Any) -> dict[str, Any]:
    return {"fn_name": "f", "inputs": [[argument]], "outputs": [value]}


def groups(items: list[Item], *, only_right: bool) -> dict[str, tuple[list[str], list[dict[str, Any]]]]:
    """Return the programs of each kind, and their labels."""
    labels = [item.label for item in items]
    found = {"published solutions": ([item.solution for item in items], labels)}
    if all(re.search(r"^class Solution\b", item.solution, re.MULTILINE) for item in items):
        bare = [{**label, "preamble": ""} for label in labels]
        return found | {"without a preamble": ([item.solution for item in items], bare)}
    found["in class Solution, without imports"] = ([in_class(item) for item in items], labels)
    if not only_right:
        pairs = zip(items, items[1:] + items[:1], strict=True)
        found["returning None"] = ([stub(item) for item in items], labels)
        found["another item's solution"] = ([other(item, neighbour) for item, neighbour in pairs], labels)
    return found


def judge(name: str, kind: str, items: list[Item], programs: list[str], labels: list[dict[str, Any]]) -> list[str]:
    """Print a line of the table. Returns the items with an unexpected score."""
    answers = [f"```python\n{program}\n```" for program in programs]
    work: list[tuple[str, Any, dict[str, Any]]] = [
        (answer, label, {}) for answer, label in zip(answers, labels, strict=True)
    ]
    outcomes = list(grade_many("code", work, settings=_SETTINGS))
    failures = [outcome for outcome in outcomes if isinstance(outcome, GraderFailure)]
    paid = [outcome for outcome in outcomes if not isinstance(outcome, GraderFailure) and outcome.score == 1]
    refused = len(outcomes) - len(paid) - len(failures)
    print(f"| {name} | {kind} | {len(paid)} | {refused} | {len(failures)} |", flush=True)
    return [
        f"{item.name}, {kind}: {outcome if isinstance(outcome, GraderFailure) else outcome.reason}"
        for item, outcome in zip(items, outcomes, strict=True)
        if isinstance(outcome, GraderFailure) or outcome.correct == (kind in _WRONG)
    ]


def main() -> None:
    only_right, paths = "--right" in sys.argv, [Path(name) for name in sys.argv[1:] if name != "--right"]
    print("| file | programs | scored 1 | scored 0 | failures |\n|---|---|---|---|---|")
    told: list[str] = []
    for path in paths:
        items = list(read(path))
        for kind, (programs, labels) in groups(items, only_right=only_right).items():
            told += judge(path.name, kind, items, programs, labels)
    large = list(large_outputs())
    told += judge("", "1 to 5 MB of output", large, [item.solution for item in large], [item.label for item in large])
    print("\n".join(told))


if __name__ == "__main__":
    main()
