"""A verifiers taskset with state, two rewards, a metric, a stop and a hook: the model adds numbers up to a goal."""

from collections.abc import Iterator

import verifiers.v1 as vf

MAX_CALLS = 4
BROKEN = 999
"""The sum at which a reward raises an exception."""


class Count(vf.State):
    """The sum so far."""

    total: int = 0
    calls: int = 0


class Adder(vf.Toolset[vf.SharedToolsetConfig, Count]):
    """The tool, on one server for all episodes; each episode has its own state."""

    @vf.tool
    def add(self, number: int) -> str:
        """Add a number to the sum."""
        self.state.total += number
        self.state.calls += 1
        return f"the sum is {self.state.total}"


class CountingData(vf.TaskData):
    """The sum to reach."""

    goal: int = 0


class CountingTask(vf.Task[CountingData, Count]):
    """Reach the goal, and name it."""

    @vf.reward
    async def reached(self, trace: vf.Trace) -> float:
        """Compare the state with the goal."""
        if trace.state.total == BROKEN:
            raise ValueError("no reward for this sum")
        return float(trace.state.total == self.data.goal)

    @vf.reward(weight=0.25)
    async def named(self, trace: vf.Trace) -> float:
        """Look for the goal in the last turn."""
        return float(f"<{self.data.goal}>" in trace.last_reply)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        """Count the calls."""
        return float(trace.state.calls)

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        """Stop after some calls."""
        return bool(trace.state.calls >= MAX_CALLS)

    @vf.intercept
    async def forbid(self, request: vf.Request) -> vf.Request | None:
        """Deny calls after an answer that names the forbidden number."""
        last, said = request.messages[-1], [m for m in request.messages if isinstance(m, vf.AssistantMessage)]
        if isinstance(last, vf.ToolMessage) and "forbidden" in str(said[-1].content):
            last.content = "denied"
            return request
        return None


class CountingTaskset(vf.Taskset[CountingTask, vf.TasksetConfig]):
    """Twenty goals; the prompt is a text or messages."""

    def load(self) -> Iterator[CountingTask]:
        """Make the tasks."""
        for goal in range(1, 21):
            text = f"Add up to {goal}."
            messages = [
                vf.UserMessage(content="hello"),
                vf.AssistantMessage(content="hi"),
                vf.UserMessage(content=text),
            ]
            prompt = messages if goal % 2 else text
            yield CountingTask(CountingData(goal=goal, prompt=prompt, system_prompt="You add." if goal % 3 else None))

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        """Name the tool servers that all episodes share."""
        return [Adder(vf.SharedToolsetConfig())]


__all__ = ["CountingTaskset"]

if __name__ == "__main__":
    Adder.run()
