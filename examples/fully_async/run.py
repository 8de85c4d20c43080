"""`python -m examples.fully_async.run`: generating never waits for training, nor a batch for its slowest trajectory."""

from pathlib import Path

from agentrl.demo.data import write_train_and_test
from agentrl.demo.example import Example


def write_data(folder: Path, seed: int) -> tuple[Path, Path]:
    """480 problems to train on, and the demo's 200 held-out ones."""
    return write_train_and_test(folder, train_count=480, seed=seed)


EXAMPLE = Example("fully_async", Path(__file__).parent / "cpu.yaml", "calculator", write_data, goal=0.8)

if __name__ == "__main__":
    EXAMPLE.main()
