"""`python -m examples.eval_multi_task.run`: one run, evaluated on four sets, each played and graded in its own way."""

import json
from pathlib import Path

from agentrl.demo.data import write_prompts, write_train_and_test
from agentrl.demo.example import Example
from agentrl.demo.task import make_problems

HERE = Path(__file__).parent


def write_data(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write 192 training problems, and the file of the four sets, which are the same for every seed."""
    train, _ = write_train_and_test(folder, train_count=192, seed=seed)
    others = make_problems(400, "test", 1)
    write_prompts(folder / "products.jsonl", [p for p in others if set("+-").isdisjoint(p.expression)][:25])
    exam = ({"question": [{"role": "user", "content": p.question}], "solution": str(p.answer)} for p in others[:50])
    (folder / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in exam), encoding="utf-8")
    sets = folder / "tasks.yaml"
    sets.write_text((HERE / "tasks.yaml").read_text(encoding="utf-8").replace("FOLDER", str(folder)), encoding="utf-8")
    return train, sets


EXAMPLE = Example("eval_multi_task", HERE / "cpu.yaml", "calculator", write_data, goal=0.8)

if __name__ == "__main__":
    EXAMPLE.main()
