"""The whole example: warm start, `agentrl train` with `cpu.yaml`, before and after, report.

python -m examples.retool.run --seed 0
"""

from pathlib import Path

from agentrl.demo.example import Example
from examples.retool.data import write_synthetic
from examples.retool.lessons import PythonLessons

EXAMPLE = Example(
    name="retool",
    config=Path("examples/retool/cpu.yaml"),
    lessons=PythonLessons(),
    write_data=write_synthetic,
)

if __name__ == "__main__":
    EXAMPLE.main()
