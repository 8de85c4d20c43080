"""The order in which prompts are drawn.

1. Position p of the run is row `shuffle(p % n)` of epoch `p // n`: a pure function of (seed, epoch, n).
2. Any position costs the same time and no memory, so a run resumes anywhere without replaying the draw.
3. The result depends only on this file: an update of a random library cannot change the order of a running job."""

from dataclasses import dataclass
from typing import NamedTuple

from agentrl.errors import DataError

_MASK = (1 << 64) - 1
_ROUNDS = 6


def mix(value: int) -> int:
    """Return 64 well-mixed bits from 64 bits, by the finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def permute(index: int, n: int, *, seed: int, epoch: int) -> int:
    """Return the position to which a shuffle of `range(n)` moves `index`, a number of that range. A balanced
    Feistel network is a bijection on 2**(2b) >= n numbers. Repeated until the result is below n (cycle walking, Black
    and Rogaway 2002), it is a bijection on `range(n)`. At most 4 repetitions are expected."""
    if not 0 <= index < n:
        raise IndexError(f"index {index} is outside range({n})")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    base = mix((mix(seed & _MASK) + epoch) & _MASK)
    keys = [mix((base + i) & _MASK) for i in range(_ROUNDS)]
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & mask)
        if (index := (left << half) | right) < n:
            return index


class DataPosition(NamedTuple):
    """One draw: the pass over the data (from 0) and the row within it."""

    epoch: int
    prompt_index: int


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Map from a position to one of `rows` prompt rows, in file order or shuffled, endless or in `num_epoch` passes."""

    rows: int
    seed: int = 0
    shuffle: bool = False
    num_epoch: int | None = None

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise DataError(f"expected at least one prompt row, got {self.rows}")

    def at(self, position: int) -> DataPosition | None:
        """Return the row at `position` (from 0), or None after the last epoch."""
        epoch, index = divmod(position, self.rows)
        if self.num_epoch is not None and epoch >= self.num_epoch:
            return None
        return DataPosition(epoch, permute(index, self.rows, seed=self.seed, epoch=epoch) if self.shuffle else index)
