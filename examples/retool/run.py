"""`make example-retool`: a tiny model learns to use a code interpreter, on a laptop."""

from pathlib import Path

from agentrl.demo.example import Example
from examples.retool.data import write_synthetic

EXAMPLE = Example(
    name="retool",
    config=Path(__file__).with_name("cpu.yaml"),
    model="examples",
    write_data=write_synthetic,
)

if __name__ == "__main__":
    EXAMPLE.main()
