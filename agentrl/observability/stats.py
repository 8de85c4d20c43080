"""Statistics over outcomes: plain numbers in and out."""

import math

SOLVED = 1.0  # minimum reward that counts as a success in pass@k


def pass_at_k(n: int, c: int, k: int) -> float:
    """Compute the probability that at least one of `k` attempts is right, drawn without replacement from `n` with `c`
    right: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1), as a product, so that large n do not
    overflow. Raises ValueError: not 0 <= c <= n, or not 1 <= k <= n."""
    if not 0 <= c <= n:
        raise ValueError(f"pass@k: expected 0 <= c <= n; got n={n}, c={c}")
    if not 1 <= k <= n:
        raise ValueError(f"pass@k: expected 1 <= k <= n; got n={n}, k={k}; take at least k samples a prompt")
    return 1.0 if n - c < k else 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))
