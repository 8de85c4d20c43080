"""How many groups may start: a pure state machine without tasks or clients.

It is told what happened (`begin`, `started`, `finished`) and says what is allowed (`wanted`, `full`).
"""

from dataclasses import dataclass

HOPELESS, HOPELESS_GROUPS = 10, 50
"""A batch for which this many times its size was dropped in a row, and at least this many groups, is given up."""


@dataclass(slots=True)
class Admission:
    """Keeps enough groups in flight to end each batch with exactly `target` kept ones; none starts between batches.

    Attributes:
        target: groups that a batch needs.
        limit: kept groups and groups in flight together, at least `target`; more is over-sampling.
        open: a batch is being filled.
        kept: groups of the batch that finished and count.
        dropped_in_row: groups that finished and do not count, since the last kept one.
        in_flight: groups started and not finished.
    """

    target: int
    limit: int
    open: bool = False
    kept: int = 0
    dropped_in_row: int = 0
    in_flight: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.target <= self.limit:
            raise ValueError(f"expected 0 <= target <= limit, got target {self.target} and limit {self.limit}")

    def begin(self, have: int = 0) -> None:
        """A batch is wanted, of which `have` groups are there already."""
        self.open, self.kept, self.dropped_in_row = True, have, 0

    def end(self) -> None:
        """The batch is full, or given up: nothing more starts."""
        self.open = False

    @property
    def full(self) -> bool:
        """Enough groups were kept."""
        return self.kept >= self.target

    @property
    def takes(self) -> bool:
        """Whether a group that finishes now counts."""
        return self.open and not self.full

    @property
    def wanted(self) -> int:
        """Groups to start now."""
        return max(0, self.limit - self.kept - self.in_flight) if self.takes else 0

    @property
    def hopeless(self) -> bool:
        """So many groups in a row were dropped that the next ones will be too."""
        return self.dropped_in_row >= max(HOPELESS * self.target, HOPELESS_GROUPS)

    def started(self) -> None:
        """A group was started."""
        self.in_flight += 1

    def given_back(self) -> None:
        """A group in flight was interrupted, or is not needed any more; it counts neither way."""
        self.in_flight -= 1

    def finished(self, *, keep: bool) -> None:
        """A group finished while the batch `takes` any."""
        self.in_flight -= 1
        self.kept += keep
        self.dropped_in_row = 0 if keep else self.dropped_in_row + 1
