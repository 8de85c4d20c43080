"""`python -m examples.multi_agent.run`: solver, rewriter and selector learn together, against an opponent that does not."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.demo.example import Example, Say
from agentrl.demo.task import Split, make_problems
from agentrl.tiny import shipped
from examples.multi_agent.team import OPPONENT
from examples.second_model import served


def write_data(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write 240 training expressions, and 100 of held-out numbers that are the same for every seed."""
    folder.mkdir(parents=True, exist_ok=True)

    def written(split: Split, count: int, key: int) -> Path:
        rows = ({"prompt": p.expression, "label": str(p.answer)} for p in make_problems(count, split, key))
        file = folder / f"{split}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return file

    return written("train", 240, seed), written("test", 100, 0)


@contextmanager
def opponent(folder: Path, say: Say) -> Iterator[list[str]]:
    """Serve the opponent, the model that the run starts from, unless the environment variable names another server."""
    if os.environ.get(OPPONENT):
        yield []
        return
    with served(shipped("examples"), folder / "opponent") as url:
        os.environ[OPPONENT] = url
        try:
            yield []
        finally:
            del os.environ[OPPONENT]


EXAMPLE = Example(
    name="multi_agent",
    config=Path(__file__).parent / "cpu.yaml",
    model="examples",
    write_data=write_data,
    goal=0.8,
    others=opponent,
)

if __name__ == "__main__":
    EXAMPLE.main()
