"""`python -m examples.true_on_policy.run`: the trainer computes, bit for bit, the engine's sampling log-probs."""

from pathlib import Path

from agentrl.demo.data import write_train_and_test
from agentrl.demo.example import Example

HERE = Path(__file__).parent


def write_data(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write 192 training problems, and the demo's 200 held-out ones."""
    return write_train_and_test(folder, train_count=192, seed=seed)


EXAMPLE = Example("true_on_policy", HERE / "cpu.yaml", "calculator", write_data, goal=0.8)

if __name__ == "__main__":
    EXAMPLE.main()
