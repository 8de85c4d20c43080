"""The demo's calculator as a taskset of verifiers: its problems, its tool and its reward.

The first `HELD_OUT` tasks have the demo's held-out problems. The later ones have endless training problems.
"""

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from agentrl.demo.data import TEST_PROBLEMS as HELD_OUT
from agentrl.demo.task import Problem, calculator, evaluate, make_problem, make_problems, score


class CalculatorTools(vf.Toolset[vf.SharedToolsetConfig]):
    """The tool, on one server for all episodes."""

    TOOL_PREFIX = None

    @vf.tool
    def calculator(self, expression: str) -> str:
        """Evaluate an expression."""
        return str(evaluate(expression))

    def register(self, mcp: Any) -> None:
        """Give the tool the schema from the shipped model's training; the library's has a title for each parameter."""
        super().register(mcp)
        mcp._tool_manager.get_tool("calculator").parameters = calculator.schema["function"]["parameters"]


class CalculatorData(vf.TaskData):
    """One problem, and its answer."""

    answer: str = ""


class CalculatorTask(vf.Task[CalculatorData]):
    """One problem."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 for the exact answer in the last turn, else 0."""
        return score(trace.last_reply, self.data.answer)


class CalculatorConfig(vf.TasksetConfig):
    """The place of the tool's server."""

    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    """All problems."""

    INFINITE = True

    def load(self) -> Iterator[CalculatorTask]:
        """Make the tasks in their order."""
        yield from map(_task, make_problems(HELD_OUT, "test", 0))
        rng = random.Random("problems to train on")
        while True:
            yield _task(make_problem(rng))

    @classmethod
    def toolsets(cls, config: CalculatorConfig) -> list[vf.Toolset]:
        """Name the tool servers that all episodes share."""
        return [CalculatorTools(config.tools)]


def _task(problem: Problem) -> CalculatorTask:
    return CalculatorTask(CalculatorData(prompt=problem.question, answer=str(problem.answer)))


__all__ = ["CalculatorTaskset"]

if __name__ == "__main__":
    CalculatorTools.run()
