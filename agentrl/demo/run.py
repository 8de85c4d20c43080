"""The demo as an example among others: the calculator, from the shipped model to nearly all unseen problems solved."""

from pathlib import Path

from agentrl.demo.data import write_train_and_test
from agentrl.demo.example import Example
from agentrl.demo.task import explain


def write_data(folder: Path, seed: int) -> tuple[Path, Path]:
    """640 problems to train on, of which 20 steps take the first half, and 200 held-out ones."""
    return write_train_and_test(folder, train_count=640, seed=seed)


DEMO = Example("demo", Path(__file__).with_name("calculator.yaml"), "calculator", write_data, goal=0.8, explain=explain)
