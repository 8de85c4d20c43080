"""`python -m examples.tau_bench.run`: a tiny model learns to serve users by a shop's policy."""

from pathlib import Path

from agentrl.demo.example import Example
from agentrl.tiny.warm_start import WarmStartSettings
from examples.tau_bench.lessons import ShopLessons
from examples.tau_bench.shop import write_data

EXAMPLE = Example(
    name="tau_bench",
    config=Path(__file__).parent / "cpu.yaml",
    lessons=ShopLessons(),
    write_data=write_data,
    warm_start=WarmStartSettings(skill_steps=200),
    goal=0.8,
)

if __name__ == "__main__":
    EXAMPLE.main()
