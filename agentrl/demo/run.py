"""The demo as an `Example`: the shipped model is trained until it solves nearly all unseen calculator problems."""

from pathlib import Path

from agentrl.demo.data import write_train_and_test
from agentrl.demo.example import Example
from agentrl.demo.task import explain


def write_data(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write 640 training problems and 200 held-out problems. 20 steps use half of the training problems."""
    return write_train_and_test(folder, train_count=640, seed=seed)


DEMO = Example("demo", Path(__file__).with_name("calculator.yaml"), "calculator", write_data, goal=0.8, explain=explain)
