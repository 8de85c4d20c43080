"""ReTool: reasoning with a code interpreter (Feng et al. 2025, arXiv:2504.11536).

1. The model calls `python`. Its code runs in the sandbox, in the trajectory's own session, so variables persist
   between calls. The next message is the printed output of the code, or its error. A turn without a call is the answer.
2. The reward is the paper's: 1 for a right answer, -1 for a wrong one. So that a group of wrong answers still has a
   gradient, a wrong one gets 0.1 back if any code of it ran (`shaped`). A bonus for each call would teach endless
   calls.
3. `--rm-type` of agentrl.rm_hub decides which answer is right.
"""

from agentrl import Environment, Sample
from agentrl.rm_hub import async_rm
from agentrl.sample import Status
from agentrl.tools.python import WithPython, python_tool

CALL_BONUS = 0.1


class RetoolEnv(WithPython, Environment):
    """Answer a question with the help of a Python interpreter."""

    max_turns = 4
    python = python_tool()
    python.description = "Run Python code."  # a tiny model reads the default's 22 words at every turn, without use

    async def reward(self, sample: Sample) -> float:
        """Return `shaped`, from -1 to 1. A truncated trajectory has no right answer."""
        right = sample.status is not Status.TRUNCATED and await async_rm(self.args, sample) == 1.0
        return shaped(right, sample.metadata.get("counters", {}).get("tool_ok", 0))


def shaped(right: bool, calls: float) -> float:
    """Return 1 if `right`, else -1, or -0.9 if the code of at least one of the `calls` ran."""
    return 1.0 if right else -1.0 + CALL_BONUS * (calls > 0)
