"""`make example-retool`: a tiny model learns to use a code interpreter, from random weights, on a laptop."""

from pathlib import Path

from agentrl.demo.example import Example
from agentrl.tiny.warm_start import WarmStartSettings
from examples.retool.data import write_synthetic
from examples.retool.lessons import PythonLessons

EXAMPLE = Example(
    name="retool",
    config=Path("examples/retool/cpu.yaml"),
    lessons=PythonLessons(),
    write_data=write_synthetic,
    warm_start=WarmStartSettings(skill_rounds=6, skill_success=0.95, habit_lr=5e-4),
)

if __name__ == "__main__":
    EXAMPLE.main()
