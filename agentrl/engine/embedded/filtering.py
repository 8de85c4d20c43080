"""Choosing tokens from filtered probabilities, compiled by numba; see `kernels`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.engine.embedded.kernels import Floats, Places, compiled


@compiled("i4(f4)", flags=())
def _bin(value: Any) -> Any:
    """Of numbers from 0 to 1; the larger number is in the same one or a higher one, 32 for each power of two."""
    return np.float32(value).view(np.int32) >> 18


@compiled("f4[::1](f4[::1], i8, f4[::1])", flags=())
def _falling(values: Floats, wanted: int, room: Floats) -> Floats:
    """Those of `values` that are in a bin, the largest first, in `room`."""
    count = 0
    for value in values:
        if _bin(value) == wanted:
            room[count] = -value
            count += 1
    found = room[:count]
    found.sort()
    for i in range(count):
        found[i] = -found[i]
    return found


@compiled("void(f4[:,::1], i8[::1], f8[::1], f4[::1], f8[::1], i8[::1], i8[::1])", flags=())
def choose(
    probs: Floats,
    top_k: Places,
    top_p: NDArray[np.float64],
    min_p: Floats,
    uniforms: NDArray[np.float64],
    tokens: Places,
    counts: Places,
) -> None:
    """For each row of `probs` [N, vocabulary] a token that the filters keep, and how many these are. The
    largest come first, of equal ones the lower id; the token is the first with which their mass passes `uniforms` times
    that of all. Only the bins in which something ends are sorted."""
    last = _bin(1.0)
    mass, sizes, room = np.empty(last + 2), np.empty(last + 2, np.int64), np.empty(probs.shape[1], np.float32)
    for row in range(len(probs)):
        values, largest = probs[row], np.float32(0)
        mass[:] = 0
        sizes[:] = 0
        for value in values:
            largest = max(largest, value)
            at = _bin(value)
            mass[at] += value
            sizes[at] += 1
        least, top = largest * min_p[row], _bin(largest)
        kept, total, end = 0, 0.0, top
        while end > _bin(least) and kept + sizes[end] < top_k[row] and total + mass[end] <= top_p[row]:
            kept += sizes[end]
            total += mass[end]
            end -= 1
        for value in _falling(values, end, room):
            if kept == top_k[row] or total > top_p[row] or value < least:
                break
            kept += 1
            total += value
        target = min(uniforms[row] * total, np.nextafter(total, 0.0))
        passed, at = 0.0, top
        while at > end and passed + mass[at] <= target:
            passed += mass[at]
            at -= 1
        chosen, alike = np.float32(-1), 0
        for value in _falling(values, at, room):
            alike = alike + 1 if value == chosen else 0
            chosen = value
            passed += value
            if passed > target:
                break
        for token in range(len(values)):
            if values[token] == chosen:
                tokens[row] = token
                alike -= 1
                if alike < 0:
                    break
        counts[row] = kept
