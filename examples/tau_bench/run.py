"""`python -m examples.tau_bench.run`: a tiny model learns to serve users by a shop's policy."""

from pathlib import Path

from agentrl.demo.example import Example
from examples.tau_bench.shop import write_data

EXAMPLE = Example(
    name="tau_bench",
    config=Path(__file__).parent / "cpu.yaml",
    model="examples",
    write_data=write_data,
    goal=0.8,
)

if __name__ == "__main__":
    EXAMPLE.main()
