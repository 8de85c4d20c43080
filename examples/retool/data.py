"""Prompts: synthetic questions for the tiny model, and GSM8K for larger ones.

    python -m examples.retool.data runs/gsm8k                              # the slice in this folder
    python -m examples.retool.data runs/gsm8k --train-file my_train.jsonl  # the whole set, in its own format

1. A synthetic question has two or three two-digit numbers. Those in `HELD_OUT_NUMBERS` occur in no training
   question, all other numbers in no held-out one, so no held-out answer can be memorized.
2. Each kind of question has one line of code. Half of the kinds are word problems, half need Python itself.
"""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

HERE = Path(__file__).parent
Split = Literal["train", "test"]

HELD_OUT_NUMBERS = tuple(n for n in range(11, 100) if n % 7 == 3)
TRAIN_NUMBERS = tuple(n for n in range(11, 100) if n % 7 != 3)

GSM8K_PROMPT = (
    "{}\n\nReason step by step. Use the python tool for every calculation: it shows what your code prints. "
    "Put the final answer, one number, in \\boxed{{}}."
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of question: its text, the expression that answers it, and the expression as a function."""

    question: str
    expression: str
    value: Callable[[int, int, int], int]


KINDS = (
    Kind("Tom has {} boxes with {} pens each and {} more pens. How many pens?", "{}*{}+{}", lambda a, b, c: a * b + c),
    Kind(
        "A shop sold {} bags of {} apples and got {} apples back. How many apples?",
        "{}*{}-{}",
        lambda a, b, c: a * b - c,
    ),
    Kind("Ann read {} pages, then {} pages a day for {} days. How many pages?", "{}+{}*{}", lambda a, b, c: a + b * c),
    Kind("What is the sum of all numbers from {} to {}?", "sum(range({},{}+1))", lambda a, b, c: sum(range(a, b + 1))),
    Kind("What is {} to the power {} modulo {}?", "pow({},{},{})", lambda a, b, c: pow(a, b, c)),
    Kind("How many digits has {} to the power {}?", "len(str({}**{}))", lambda a, b, c: len(str(a**b))),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question: its kind and its numbers."""

    kind: Kind
    numbers: tuple[int, int, int]

    @property
    def question(self) -> str:
        return self.kind.question.format(*self.numbers)

    @property
    def expression(self) -> str:
        return self.kind.expression.format(*self.numbers)

    @property
    def answer(self) -> int:
        return self.kind.value(*self.numbers)


def make_problem(rng: random.Random, split: Split = "train") -> Problem:
    """Draw a random question."""
    numbers = rng.sample(TRAIN_NUMBERS if split == "train" else HELD_OUT_NUMBERS, 3)
    first, second = sorted(numbers[:2])  # so that a sum from one number to another is never empty
    return Problem(rng.choice(KINDS), (first, second, numbers[2]))


def make_problems(count: int, split: Split, seed: int) -> list[Problem]:
    """Return `count` different questions, the same for the same seed."""
    rng = random.Random(f"{split} questions {seed}")
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = make_problem(rng, split)
        problems.setdefault(problem.question, problem)
    return list(problems.values())


def write_synthetic(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write `train.jsonl` with 800 questions and `test.jsonl` with 200, which are the same for every seed."""
    train = [_row(p.question, str(p.answer)) for p in make_problems(800, "train", seed)]
    test = [_row(p.question, str(p.answer)) for p in make_problems(200, "test", 0)]
    return _write(folder / "train.jsonl", train), _write(folder / "test.jsonl", test)


def gsm8k_rows(file: Path) -> list[dict[str, Any]]:
    """Yield prompt rows of a file in GSM8K's own format: `question`, and `answer` that ends with `#### number`."""
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [_row(GSM8K_PROMPT.format(row["question"]), row["answer"].rpartition("####")[2].strip()) for row in rows]


def _row(question: str, answer: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": question}], "label": answer}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--train-file", default=HERE / "data/gsm8k_train.jsonl", type=click.Path(exists=True, path_type=Path))
@click.option("--test-file", default=HERE / "data/gsm8k_test.jsonl", type=click.Path(exists=True, path_type=Path))
def main(folder: Path, train_file: Path, test_file: Path) -> None:
    """Write GSM8K prompts to FOLDER/train.jsonl and FOLDER/test.jsonl."""
    for source, name in ((train_file, "train.jsonl"), (test_file, "test.jsonl")):
        click.echo(_write(folder / name, gsm8k_rows(source)))


if __name__ == "__main__":
    main()
