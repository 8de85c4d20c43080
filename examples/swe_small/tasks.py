"""Twenty small repositories with one bug each, made from a seed. Nothing is written to disk here.

    python -m examples.swe_small.tasks prompts.jsonl --seed 0

The correct results of hidden tests never enter a sandbox: a runner inside computes results, and `grade` compares them.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from examples.swe_small.catalog import BUGS, Bug

PACKAGES = ("toolbelt", "sundries", "handies", "basics")
HIDDEN, VISIBLE, FAILING = 6, 3, 3
DRAWS, ROUNDS = 100, 20


@dataclass(frozen=True, slots=True)
class Task:
    """A repository and its hidden tests.

    Attributes:
        files: text by path, as the agent finds them.
        oracle: text by path that repairs the repository.
        prompt: the issue.
        module: path of the tested module.
        calls: expressions of the hidden tests.
        expected: `repr` of each expression's value, or the name of its exception.
    """

    files: dict[str, str]
    oracle: dict[str, str]
    prompt: str
    module: str
    calls: tuple[str, ...]
    expected: tuple[str, ...]


def results(source: str, calls: Sequence[str]) -> list[str]:
    """Evaluate `calls` in a module of the catalog: each value's `repr`, or the name of its exception."""
    found: list[str] = []
    code = compile(source, "catalog", "exec")
    for call in calls:
        names: dict[str, Any] = {}
        exec(code, names)
        try:
            found.append(repr(eval(call, names)))  # noqa: S307
        except Exception as error:  # noqa: BLE001
            found.append(type(error).__name__)
    return found


@lru_cache(maxsize=256)
def make_task(number: int, seed: int = 0) -> Task:
    """Make task `number`, from 0 and modulo 20. The same numbers give the same task."""
    bug = BUGS[number % len(BUGS)]
    rng = Random(f"{seed}/{bug.module}")
    calls: list[str] = []
    failing: list[int] = []
    passing: list[int] = []
    for _ in range(ROUNDS):
        calls = list(dict.fromkeys([*calls, *(bug.call(rng) for _ in range(DRAWS))]))
        right, wrong = results(bug.source, calls), results(bug.broken, calls)
        failing = [at for at in range(len(calls)) if right[at] != wrong[at]]
        passing = [at for at in range(len(calls)) if right[at] == wrong[at]]
        if len(failing) >= FAILING and len(passing) > VISIBLE:
            break
    shown, hidden = failing[0], [*(failing[1 : HIDDEN + 1] or failing), *passing[VISIBLE : VISIBLE + HIDDEN]]
    package = rng.choice(PACKAGES)
    path = f"{package}/{bug.module}.py"
    others = [other for other in rng.sample(BUGS, 4) if other is not bug][:3]
    tests = _tests(package, bug, [(calls[at], right[at]) for at in passing[:VISIBLE]])
    files = {
        f"{package}/__init__.py": "",
        path: bug.broken,
        "tests/__init__.py": "",
        f"tests/test_{bug.module}.py": tests,
    }
    files |= {f"{package}/{other.module}.py": other.source for other in others}
    prompt = (
        f"The Python package {package} has a bug. {bug.complaint}\n"
        f"Example: {calls[shown]} gives {wrong[shown]}; expected is {right[shown]}.\n"
        "Repair the package. `python3 -m unittest discover -s tests -t .` runs its tests."
    )
    return Task(
        files, {path: bug.source}, prompt, path, tuple(calls[at] for at in hidden), tuple(right[at] for at in hidden)
    )


def _tests(package: str, bug: Bug, known: Sequence[tuple[str, str]]) -> str:
    lines = ["import unittest", "", f"from {package}.{bug.module} import *", "", "", "class Test(unittest.TestCase):"]
    for at, (call, result) in enumerate(known):
        lines += [f"    def test_{at}(self):", f"        self.assertEqual(repr({call}), {result!r})", ""]
    return "\n".join(lines)


def write_files(files: dict[str, str], folder: Path) -> None:
    """Write text by path into a folder."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def rows(seed: int = 0) -> list[dict[str, Any]]:
    """Return the rows of a prompt file: the issue, and the number and seed of the task. Hidden tests are not in it."""
    return [
        {"prompt": make_task(number, seed).prompt, "label": "", "metadata": {"task": number, "seed": seed}}
        for number in range(len(BUGS))
    ]


def main() -> None:
    """Write a prompt file."""
    parser = argparse.ArgumentParser(description="Write the prompts of 20 repositories with planted bugs.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.path.parent.mkdir(parents=True, exist_ok=True)
    options.path.write_text("".join(json.dumps(row) + "\n" for row in rows(options.seed)), encoding="utf-8")


if __name__ == "__main__":
    main()
