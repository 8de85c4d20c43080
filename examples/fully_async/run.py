"""`python -m examples.fully_async.run`: generation never waits for training, nor a batch for its slowest trajectory."""

from pathlib import Path

from agentrl.demo.data import write_train_and_test
from agentrl.demo.example import Example


def write_data(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write 480 training problems, and the demo's 200 held-out ones."""
    return write_train_and_test(folder, train_count=480, seed=seed)


EXAMPLE = Example("fully_async", Path(__file__).parent / "cpu.yaml", "calculator", write_data, goal=0.8)

if __name__ == "__main__":
    EXAMPLE.main()
