"""Check of the first groups of a process: an error that every group will have stops the run under any failure policy.

1. The first `FIRST_GROUPS` groups to start count, not the first to end: short answers and too long prompts end first.
2. The run stops if the reward failed in each of these groups and no trajectory was graded, or if no prompt fits.
   If one of these groups was graded, later failures follow the policy."""

from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.errors import AgentRLError
from agentrl.rollout.failures import DropGroup
from agentrl.rollout.stats import RolloutStats, Tally

FIRST_GROUPS = 8
_REWARD, _PROMPT = "no trajectory of the first {} groups could be graded", "no prompt of the first {} groups fits"


class StartupCheck:
    """Observer of the groups that a process generates for training, or for evaluations."""

    def __init__(self) -> None:
        self._places = FIRST_GROUPS
        self._ended: list[str] = []  # the causes, in order
        self._last = ""

    @contextmanager
    def playing(self, tally: Tally) -> Iterator[None]:
        """Watch one group with counts `tally`. Raises AgentRLError: as `judge`, if it ends the first groups."""
        if not self._places:
            yield
            return
        self._places -= 1
        try:
            yield
        except DropGroup:
            self._note(tally.stats)
            raise
        except BaseException:  # an interrupted group does not count
            self._places += 1
            raise
        self._note(tally.stats)

    def _note(self, stats: RolloutStats) -> None:
        self._ended.append(_cause(stats))
        self._last = stats.last_failure
        if len(self._ended) == FIRST_GROUPS:
            self.judge()

    def judge(self) -> None:
        """Judge the first groups that have ended. Raises AgentRLError: all of them failed for the same reason."""
        if (causes := set(self._ended)) in ({_REWARD}, {_PROMPT}):
            raise AgentRLError(f"{causes.pop().format(len(self._ended))}: {self._last}")


def _cause(stats: RolloutStats) -> str:
    """Return `_REWARD` or `_PROMPT` if this is why no trajectory of the group was graded, otherwise ""."""
    if any(name.startswith("grader/") for name in stats.failures):
        return "" if stats.graded else _REWARD
    return _PROMPT if set(stats.failures) == {"overflow/prompt_too_long"} and not stats.graded else ""
