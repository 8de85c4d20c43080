"""`python -m examples.geo3k_vlm.run`: a tiny model that sees learns to look closer before it answers, on a laptop."""

from pathlib import Path

from agentrl.demo.example import Example
from examples.geo3k_vlm.scenes import write_data

HERE = Path(__file__).parent

EXAMPLE = Example(
    name="geo3k_vlm",
    config=HERE / "cpu.yaml",
    model=HERE / "tiny",
    write_data=write_data,
    goal=0.85,
)

if __name__ == "__main__":
    EXAMPLE.main()
