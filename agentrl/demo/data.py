"""The demo's prompt files."""

import json
from collections.abc import Iterable
from pathlib import Path

from agentrl.demo.task import Problem, make_problems

TEST_PROBLEMS = 200


def write_prompts(path: Path, problems: Iterable[Problem]) -> Path:
    """Write one JSON object per line: `prompt` (chat messages), `label` (the exact answer), `metadata.careful`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for problem in problems:
            prompt = [{"role": "user", "content": problem.question}]
            row = {"prompt": prompt, "label": str(problem.answer), "metadata": {"careful": problem.careful}}
            file.write(json.dumps(row) + "\n")
    return path


def write_train_and_test(folder: Path, *, train_count: int, seed: int) -> tuple[Path, Path]:
    """Write `train.jsonl` and `test.jsonl` in `folder`; the test problems are the same for every seed."""
    train = write_prompts(folder / "train.jsonl", make_problems(train_count, "train", seed))
    return train, write_prompts(folder / "test.jsonl", make_problems(TEST_PROBLEMS, "test", 0))
