"""`python -m examples.openai_agents.run`: an agent of the OpenAI Agents SDK learns to use a calculator."""

from pathlib import Path

from agentrl.demo.example import Example
from agentrl.demo.run import write_data
from agentrl.demo.task import explain

EXAMPLE = Example(
    name="openai_agents",
    config=Path(__file__).parent / "cpu.yaml",
    model="calculator",
    write_data=write_data,
    goal=0.8,
    explain=explain,
)

if __name__ == "__main__":
    EXAMPLE.main()
