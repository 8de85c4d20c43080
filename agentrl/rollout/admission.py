"""The state machine of admission: it decides how many groups may start and if the batch is full.

1. Callers report events (`begin`, `started`, `ended`, `finished`, `handed`, `wait`, `updated`) and ask for decisions
   (`wanted`, `full`, `stale`). The state machine has no tasks and no clients.
2. A group's version is the number of rollouts that the engines' weights had been trained on when the group started.
   Batch n is trained from weights of version n, so a group of version v in it is at most n - v stale.
3. Under version v, groups may start as long as the batches up to v + staleness have a place for them. A batch takes the
   oldest finished groups. It is full if enough groups are finished, and later batches have a place for each group in
   flight before the group is too stale. `surplus` groups need none; without them no group becomes too stale.
4. If groups start between batches, `held` starts are delayed, so that these groups sample newer weights. A run begins
   with the maximum. The target is that a batch leaves finished groups of a quarter batch over. If groups are missing
   when the trainer asks for a batch, `held` falls by the missing groups plus the quarter. After `WINDOW` batches
   without a missing group, `held` changes by the smallest number left over minus the quarter."""

from collections import Counter
from dataclasses import dataclass, field

HOPELESS, HOPELESS_GROUPS = 10, 50  # a batch ends if this many batches of groups, and groups, are dropped in a row

WINDOW = 8  # number of batches in a row that must leave groups over before more starts are delayed


@dataclass(slots=True)
class Admission:
    """State machine that keeps as many groups in flight as batches, staleness and places allow."""

    batch: int  # number of groups of a training step
    surplus: int = 0  # number of groups in flight beyond the need of the batches; as many may become too stale
    staleness: int = 0  # number of rollouts that a group may be stale when it is trained
    places: int = 1024  # maximum number of trajectories in flight
    size: int = 1  # number of trajectories of a group
    steps: int | None = None  # number of batches of the whole run; no group starts for later batches
    between: bool = False  # true if groups also start and continue between batches; never with staleness 0
    ageless: bool = False  # true if no group is ever too stale, because stale tokens are masked
    step: int = 0  # number of the batch that is filled now or next
    version: int = 0  # version of the engines' weights
    open: bool = False
    kept: Counter[int] = field(default_factory=Counter)  # version -> number of finished groups that wait for a batch
    playing: Counter[int] = field(default_factory=Counter)  # version -> number of groups in flight
    busy: int = 0  # number of trajectories in flight
    dropped_in_row: int = 0  # number of groups that were dropped since the last kept group
    held: int = field(init=False, default=0)  # number of groups whose start is delayed although staleness allows it
    spare: list[int] = field(init=False, default_factory=list)
    """For each batch since `held` changed: finished groups left over, less a quarter of a batch; may be negative."""

    def __post_init__(self) -> None:
        self.held = self._most_held

    def begin(self, step: int) -> None:
        """Start to fill batch `step`."""
        if self.between and self.open:  # no group can have finished before the first batch
            self._hold_back(self.kept.total() - self.batch)
        self.open, self.step, self.dropped_in_row = True, step, 0
        # A group of an older version would be too stale for this batch.
        self.version = max(self.version, step - self.staleness)

    def _hold_back(self, spare: int) -> None:
        """Correct `held` at a batch that leaves `spare` groups over; a negative `spare` counts missing groups."""
        self.spare.append((spare if self.full else min(spare, 0)) - self.batch // 4)
        if spare < 0 or len(self.spare) == WINDOW:
            self.held = max(0, min(self.held + min(self.spare), self._most_held))
            self.spare.clear()

    @property
    def _most_held(self) -> int:
        """Greatest `held`: the groups of two batches may always be in flight or finished."""
        return max(0, self.staleness - 1) * self.batch if self.between else 0

    def wait(self, kept: Counter[int]) -> None:
        """Record the finished groups, by version, that wait for the next batch or later batches."""
        self.kept = +kept

    def handed(self) -> None:
        """Record that the batch went to the trainer."""
        self.open, self.step = self.between, self.step + 1

    def close(self) -> None:
        """Let no more groups start."""
        self.open = False

    def updated(self, version: int) -> None:
        """Record that the engines sample with weights of `version` from now on."""
        self.version = version

    @property
    def wanted(self) -> int:
        """Number of groups to start now."""
        ahead = self.version + self.staleness + 1 - self.step
        left = ahead if self.steps is None else self.steps - self.step
        if not self.open or min(ahead, left) <= 0 or (self.full and not self.between):
            return 0
        room = min(max(ahead * self.batch - self.held, self.batch), left * self.batch)
        room += self.surplus - self.kept.total() - self.playing.total()
        return max(0, min(room, -((self.busy - self.places) // self.size)))

    @property
    def full(self) -> bool:
        """True if the trainer can take the batch."""
        if self.kept.total() < self.batch:
            return False
        return self.ageless or all(self._in_time(version) for version in self.playing)

    def _in_time(self, version: int) -> bool:
        """Return true if later batches have a place for each group up to `version` before the group is too stale."""
        kept = sum(n for v, n in self.kept.items() if v <= version)
        playing = sum(n for v, n in self.playing.items() if v <= version)
        left = playing + max(0, kept - self.batch)
        return not playing or left <= max(0, version + self.staleness - self.step) * self.batch + self.surplus

    @property
    def scarce(self) -> bool:
        """True if the batch needs every group in flight: another group has to replace a dropped one."""
        return self.kept.total() + self.playing.total() <= self.batch

    def stale(self, version: int) -> bool:
        """Return true if a group of this version in flight is too stale for the next batch."""
        return not self.ageless and version < self.step - self.staleness

    @property
    def oldest(self) -> int:
        """Lowest version of a finished group that the next batch can take."""
        return self.version if self.ageless else self.step - self.staleness

    @property
    def hopeless(self) -> bool:
        """True if too many groups in a row were dropped, so that the batch ends with an error."""
        return self.dropped_in_row >= max(HOPELESS * self.batch, HOPELESS_GROUPS)

    def started(self) -> int:
        """Record that a group started; return its version."""
        self.playing[self.version] += 1
        self.busy += self.size
        return self.version

    def ended(self, trajectories: int = 1) -> None:
        """Record the end of this number of trajectories of a group in flight."""
        self.busy -= trajectories

    def finished(self, version: int, *, keep: bool | None) -> None:
        """Record the end of a group in flight: kept, dropped, or released (None). A release is not a drop."""
        self.playing[version] -= 1
        if keep:
            self.kept[version] += 1
        self.dropped_in_row = 0 if keep else self.dropped_in_row + (keep is False)
