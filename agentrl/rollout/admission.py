"""How many groups to start: a pure state machine without tasks or clients.

It is told what happened (`started`, `kept`, `dropped`) and says what is allowed (`wanted`, `done`).
"""

from dataclasses import dataclass


@dataclass(slots=True)
class GroupScheduler:
    """Keeps enough groups in flight to end with exactly `target` kept ones.

    Attributes:
        target: groups that the rollout needs.
        limit: kept groups and groups in flight together, at least `target`; more is over-sampling.
        kept: groups that finished and count.
        dropped: groups that finished and do not count.
        dropped_in_row: those since the last kept one.
        in_flight: groups started and not finished.
    """

    target: int
    limit: int
    kept: int = 0
    dropped: int = 0
    dropped_in_row: int = 0
    in_flight: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.target <= self.limit:
            raise ValueError(f"expected 0 <= target <= limit, got target {self.target} and limit {self.limit}")

    @property
    def done(self) -> bool:
        """Enough groups were kept."""
        return self.kept >= self.target

    @property
    def wanted(self) -> int:
        """Groups to start now."""
        return 0 if self.done else max(0, self.limit - self.kept - self.in_flight)

    def started(self, count: int) -> None:
        """`count` groups were started."""
        self.in_flight += count

    def finished(self, *, keep: bool) -> bool:
        """One group finished; returns whether it counts (a kept group beyond the target does not)."""
        self.in_flight -= 1
        if keep and not self.done:
            self.kept += 1
            self.dropped_in_row = 0
            return True
        if not keep:
            self.dropped += 1
            self.dropped_in_row += 1
        return False
