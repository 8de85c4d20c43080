"""`python -m examples.on_policy_distillation.run`: a student with bad habits learns from a teacher, without any reward."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.demo.data import write_train_and_test
from agentrl.demo.example import Example, Say
from agentrl.tiny import shipped
from examples.tiny_models.calculator import CalculatorLessons
from examples.tiny_models.warm_start import WarmStartSettings, in_own_process, practise

TEACHER = WarmStartSettings(habit_steps=40)
"""Steps with correct demonstrations, which remove the student's bad habits."""


def write_data(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write 1440 training problems, and the demo's 200 held-out ones."""
    return write_train_and_test(folder, train_count=1440, seed=seed)


@contextmanager
def teacher(folder: Path, say: Say) -> Iterator[list[str]]:
    """Make the teacher from the student: half a minute."""
    made = in_own_process(practise, folder / "teacher", shipped("calculator"), CalculatorLessons(), TEACHER, say)
    yield ["--opd-teacher-load", str(made)]


EXAMPLE = Example(
    name="on_policy_distillation",
    config=Path(__file__).parent / "cpu.yaml",
    model="calculator",
    write_data=write_data,
    goal=0.8,
    others=teacher,
)

if __name__ == "__main__":
    EXAMPLE.main()
