"""Statistics over samples and outcomes: pure functions, plain numbers in and out.

1. `pass_at_k` is the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, eq. 1).
2. `compare` sets what was offered to training beside what was trained on: dropping slow or failed work is a bias
   that nobody sees unless it is measured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.sample import Sample


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of `k` attempts, drawn without replacement from `n` with `c` right, is right.

    1 - C(n-c, k) / C(n, k), as a product, so that large n do not overflow.

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n.
    """
    if not 0 <= c <= n:
        raise ValueError(f"pass@k: expected 0 <= c <= n; got n={n}, c={c}")
    if not 1 <= k <= n:
        raise ValueError(f"pass@k: expected 1 <= k <= n; got n={n}, k={k}; take at least k samples a prompt")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def pass_at_1(n: int, c: int) -> float:
    """The share of right attempts: `pass_at_k` with k = 1."""
    return pass_at_k(n, c, 1)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Count, mean, median, 95th percentile and extremes of some numbers; all 0 if there are none."""

    count: int = 0
    mean: float = 0.0
    median: float = 0.0
    p95: float = 0.0
    smallest: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution":
        """Describe `values`; those that are not finite are left out."""
        kept = sorted(v for v in values if math.isfinite(v))
        if not kept:
            return cls()
        middle, high = quantile(kept, 0.5), quantile(kept, 0.95)
        return cls(len(kept), math.fsum(kept) / len(kept), middle, high, kept[0], kept[-1])


def quantile(ordered: Sequence[float], q: float) -> float:
    """The `q` quantile of sorted values, linear between neighbours.

    Raises:
        ValueError: no values, or q outside [0, 1].
    """
    if not ordered or not 0 <= q <= 1:
        raise ValueError(f"quantile: expected sorted values and 0 <= q <= 1; got {len(ordered)} values, q={q}")
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantity over what was offered and over what was trained on."""

    name: str
    offered: Distribution
    trained: Distribution

    @property
    def shift(self) -> float:
        """Mean of the trained minus mean of the offered."""
        return self.trained.mean - self.offered.mean


def compare(
    offered: Sequence[Sample], trained: Sequence[Sample], reward_key: str | None = None
) -> Mapping[str, Comparison]:
    """Length (response tokens), time (seconds outside generation) and reward, offered against trained.

    Samples without a reward are left out of the reward figures.
    """
    pairs = {
        "length": ([float(s.response_length) for s in offered], [float(s.response_length) for s in trained]),
        "time": ([s.non_generation_time for s in offered], [s.non_generation_time for s in trained]),
        "reward": (_rewards(offered, reward_key), _rewards(trained, reward_key)),
    }
    return {name: Comparison(name, Distribution.of(a), Distribution.of(b)) for name, (a, b) in pairs.items()}


def _rewards(samples: Sequence[Sample], key: str | None) -> list[float]:
    return [s.get_reward_value(key) for s in samples if s.reward is not None]
