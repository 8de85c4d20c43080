"""Choice of tokens from filtered probabilities, compiled by numba; see `kernels`."""

from typing import Any

import numpy as np

from agentrl.engine.embedded.kernels import Doubles, Floats, Places, compiled


@compiled("i4(f4)", flags=())
def _bin(value: Any) -> Any:
    """Return the bin of a number from 0 to 1. Bins rise with the number; each power of two has 32."""
    return np.float32(value).view(np.int32) >> 18


@compiled("f4[::1](f4[::1], i8, f4[::1])", flags=())
def _falling(values: Floats, wanted: int, room: Floats) -> Floats:
    """Return the numbers of the bin `wanted`, the largest first; `room` is memory for them."""
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
    probs: Floats, top_k: Places, top_p: Doubles, min_p: Floats, uniforms: Doubles, tokens: Places, counts: Places
) -> None:
    """Choose a token for each row of `probs` [N, vocabulary] among the tokens that the filters keep, and count the kept
    tokens. Kept tokens are ordered by falling probability, then by id. The chosen token is the first at which the
    cumulative probability passes `uniforms` times the total. Only the bins in which a search ends are sorted."""
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
