"""The first groups of a process: a mistake that every group will meet stops the run, whatever the failure policy says.

1. The first `FIRST_GROUPS` that are started count, not the first that end: short answers and too long prompts end soon.
2. If the reward failed in every one of them and graded no trajectory, or if no prompt of theirs fitted, the next ones
   would fail as well. Where one was graded, later failures follow the policy."""

from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.errors import AgentRLError
from agentrl.rollout.failures import DropGroup
from agentrl.rollout.stats import RolloutStats, Tally

FIRST_GROUPS = 8
_REWARD, _PROMPT = "no trajectory of the first {} groups could be graded", "no prompt of the first {} groups fits"


class StartupCheck:
    """Told of every group that a process plays for training, or for evaluations."""

    def __init__(self) -> None:
        self._places = FIRST_GROUPS
        self._ended: list[str] = []  # the causes, in order
        self._last = ""

    @contextmanager
    def playing(self, tally: Tally) -> Iterator[None]:
        """Watch one group, whose own counts are in `tally`. Raises AgentRLError: it was the last of the first groups,
        and all of them failed alike."""
        if not self._places:
            yield
            return
        self._places -= 1
        try:
            yield
        except DropGroup:
            self._note(tally.stats)
            raise
        except BaseException:  # broken off: it says nothing
            self._places += 1
            raise
        self._note(tally.stats)

    def _note(self, stats: RolloutStats) -> None:
        self._ended.append(_cause(stats))
        self._last = stats.last_failure
        if len(self._ended) == FIRST_GROUPS:
            self.judge()

    def judge(self) -> None:
        """Take the groups so far for the first ones: there are no more, or enough. Raises AgentRLError: all of them
        failed alike."""
        if (causes := set(self._ended)) in ({_REWARD}, {_PROMPT}):
            raise AgentRLError(f"{causes.pop().format(len(self._ended))}: {self._last}")


def _cause(stats: RolloutStats) -> str:
    """The reason why the group has no graded trajectory; "" if it has one, or for another reason."""
    if any(name.startswith("grader/") for name in stats.failures):
        return "" if stats.graded else _REWARD
    return _PROMPT if set(stats.failures) == {"overflow/prompt_too_long"} and not stats.graded else ""
