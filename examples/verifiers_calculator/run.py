"""`python -m examples.verifiers_calculator.run`: the demo's task as a taskset of the library verifiers."""

import json
from collections.abc import Iterable
from pathlib import Path

from agentrl.demo.data import TEST_PROBLEMS
from agentrl.demo.example import Example
from agentrl.demo.task import explain

TRAINED = 320
"""Number of tasks for 20 steps."""


def write_data(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write the numbers of the tasks: different training tasks for each seed, and the held-out ones."""
    begin = TEST_PROBLEMS + TRAINED * seed
    train = _write(folder / "train.jsonl", range(begin, begin + TRAINED))
    return train, _write(folder / "test.jsonl", range(TEST_PROBLEMS))


def _write(path: Path, numbers: Iterable[int]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"prompt": f"task {number}", "metadata": {"task": number}} for number in numbers)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


EXAMPLE = Example(
    name="verifiers_calculator",
    config=Path(__file__).with_name("cpu.yaml"),
    model="calculator",
    write_data=write_data,
    goal=0.8,
    explain=explain,
)

if __name__ == "__main__":
    EXAMPLE.main()
