"""How many groups may start, and which batch is there: a pure state machine without tasks or clients.

1. It is told what happened (`begin`, `started`, `ended`, `finished`, `handed`, `wait`, `updated`) and says what is allowed
   (`wanted`, `full`, `stale`).
2. A group's version is the number of rollouts that the engines' weights had been trained on when it was started. Batch n
   is trained by weights that n rollouts have trained, so a group of version v in it is n - v rollouts stale, or less.
3. So many groups are admitted under version v that the batches up to v + staleness hold them all. Batches take the
   oldest finished groups; a batch is full when it has its groups and the ones after it can still hold every older group
   in time, but for `surplus` of them. Hence without surplus nothing becomes too stale, and nothing is given up.
"""

from collections import Counter
from dataclasses import dataclass, field

HOPELESS, HOPELESS_GROUPS = 10, 50
"""A batch for which this many times its size was dropped in a row, and at least this many groups, is given up."""


@dataclass(slots=True)
class Admission:
    """Keeps as many groups in play as batches, staleness and places allow.

    Attributes:
        batch: groups of a training step.
        surplus: groups in play beyond those that batches need; as many may be left behind.
        staleness: rollouts that a group may be stale when it is trained.
        places: trajectories that may be in play at once.
        size: trajectories of a group.
        steps: batches of the whole run; no group is started for later ones.
        between: groups start between batches too, and those in play go on; never with staleness 0.
        ageless: no group is ever too stale, since its stale tokens are not trained on.
        step: the batch that is being filled, or will be next.
        version: of the engines' weights.
        kept: groups that are finished and wait for a batch, by version.
        playing: groups in play, by version.
        busy: trajectories in play.
        dropped_in_row: groups that finished and do not count, since the last kept one.
    """

    batch: int
    surplus: int = 0
    staleness: int = 0
    places: int = 1024
    size: int = 1
    steps: int | None = None
    between: bool = False
    ageless: bool = False
    step: int = 0
    version: int = 0
    open: bool = False
    kept: Counter[int] = field(default_factory=Counter)
    playing: Counter[int] = field(default_factory=Counter)
    busy: int = 0
    dropped_in_row: int = 0

    def begin(self, step: int) -> None:
        """Batch `step` is wanted."""
        self.open, self.step, self.dropped_in_row = True, step, 0
        # Weights older than that could not train it.
        self.version = max(self.version, step - self.staleness)

    def wait(self, kept: Counter[int]) -> None:
        """So many finished groups wait for the next batch or later ones, by version."""
        self.kept = +kept

    def handed(self) -> None:
        """The batch went to the trainer."""
        self.open, self.step = self.between, self.step + 1

    def close(self) -> None:
        """Nothing more starts."""
        self.open = False

    def updated(self, version: int) -> None:
        """The engines sample with weights of `version` from now on."""
        self.version = version

    @property
    def wanted(self) -> int:
        """Groups to start now."""
        ahead = self.version + self.staleness + 1
        ahead = (ahead if self.steps is None else min(ahead, self.steps)) - self.step
        if not self.open or ahead <= 0 or (self.full and not self.between):
            return 0
        room = ahead * self.batch + self.surplus - self.kept.total() - self.playing.total()
        return max(0, min(room, -((self.busy - self.places) // self.size)))

    @property
    def full(self) -> bool:
        """The batch can be handed over."""
        if self.kept.total() < self.batch:
            return False
        return self.ageless or all(self._in_time(version) for version in self.playing)

    def _in_time(self, version: int) -> bool:
        """Return true if the batches after this one can hold the groups up to `version` before they are too stale."""
        kept = sum(n for v, n in self.kept.items() if v <= version)
        playing = sum(n for v, n in self.playing.items() if v <= version)
        left = playing + max(0, kept - self.batch)
        return not playing or left <= max(0, version + self.staleness - self.step) * self.batch + self.surplus

    @property
    def scarce(self) -> bool:
        """If one of the groups in play does not count, another one has to start for the batch."""
        return self.kept.total() + self.playing.total() <= self.batch

    def stale(self, version: int) -> bool:
        """Return true if a group in play of this version is too stale for the next batch."""
        return not self.ageless and version < self.step - self.staleness

    @property
    def oldest(self) -> int:
        """The least version of a finished group that the next batch can take."""
        return self.version if self.ageless else self.step - self.staleness

    @property
    def hopeless(self) -> bool:
        """So many groups in a row were dropped that the next ones will be too."""
        return self.dropped_in_row >= max(HOPELESS * self.batch, HOPELESS_GROUPS)

    def started(self) -> int:
        """A group was started; returns its version."""
        self.playing[self.version] += 1
        self.busy += self.size
        return self.version

    def ended(self, trajectories: int = 1) -> None:
        """Trajectories of a group in play ended."""
        self.busy -= trajectories

    def finished(self, version: int, *, keep: bool | None) -> None:
        """A group in play is finished: kept, dropped, or (None) given back, which counts neither way."""
        self.playing[version] -= 1
        if keep:
            self.kept[version] += 1
        self.dropped_in_row = 0 if keep else self.dropped_in_row + (keep is False)
