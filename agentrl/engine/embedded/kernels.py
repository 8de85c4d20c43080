"""Numba kernels for decoder layers with few tokens. Each makes one pass over memory.

1. Compiled once a machine. The code is kept beside this file or, if that folder is read-only, in the user's cache folder.
2. Arrays of numbers are float32; results are written into the caller's arrays. The order of summation is not specified; a NaN stays a NaN.
3. `where`, int64 [4, T], has for each token its slot, its position, `root` and `shared`: its first `shared` keys and values
   are read from slot `root`. So siblings find what they have in common in the processor's cache."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Places = NDArray[np.int64]
_F = TypeVar("_F", bound=Callable[..., Any])
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.442695041), np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXP = tuple(map(np.float32, (1.98756915e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)))


def compiled(*signature: str, flags: tuple[str, ...] = ("reassoc", "contract", "nsz", "arcp")) -> Callable[[_F], _F]:
    """Return a decorator that compiles for one signature, or for use in other kernels. `flags`: LLVM's fast-math flags."""

    def decorate(function: _F) -> _F:
        options = {"fastmath": set(flags), "nogil": True, "error_model": "numpy", "boundscheck": False}
        try:
            made: _F = numba.njit(*signature, cache=True, **options)(function)
        except (RuntimeError, OSError):  # there is no cache folder that can be written
            made = numba.njit(*signature, **options)(function)
        return made

    return decorate


@intrinsic
def _prefetch(context: Any, array: Any, row: Any, column: Any) -> Any:
    """Prefetch the cache line of an element, which may be past the array's end."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, given[0])
        place = cgutils.get_item_pointer(context, builder, signature.args[0], array, given[1:])
        address, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        to_read, soon, data = number(0), number(2), number(1)
        builder.call(function, [builder.bitcast(place, address), to_read, soon, data])
        return context.get_dummy_value()

    return types.void(array, row, column), generate


@compiled("void(f4[:,::1], f4[:,::1], f4[:,::1], i8, i8)")
def product(rows: Floats, weight: Floats, out: Floats, low: int, top: int) -> None:
    """`rows` [T, K] times `weight` [N, K], as columns `low` to `top` (at least 8 of them) of `out` [T, N]. Registers
    hold two rows by eight columns; the next eight columns' weights are prefetched. T changes no result."""
    prefetched = 16 * rows.shape[1] // max(2, len(rows))
    for column in range(low, top, 8):
        n = min(column, top - 8)
        for one in range(0, len(rows), 2):
            two = min(one + 1, len(rows) - 1)
            for k in range(one // 2 * prefetched, (one // 2 + 1) * prefetched, 16):
                _prefetch(weight, n + 8, k)
            a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = np.float32(0)
            b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = np.float32(0)
            for k in range(rows.shape[1]):
                a, b = rows[one, k], rows[two, k]
                a0, b0 = a0 + a * weight[n, k], b0 + b * weight[n, k]
                a1, b1 = a1 + a * weight[n + 1, k], b1 + b * weight[n + 1, k]
                a2, b2 = a2 + a * weight[n + 2, k], b2 + b * weight[n + 2, k]
                a3, b3 = a3 + a * weight[n + 3, k], b3 + b * weight[n + 3, k]
                a4, b4 = a4 + a * weight[n + 4, k], b4 + b * weight[n + 4, k]
                a5, b5 = a5 + a * weight[n + 5, k], b5 + b * weight[n + 5, k]
                a6, b6 = a6 + a * weight[n + 6, k], b6 + b * weight[n + 6, k]
                a7, b7 = a7 + a * weight[n + 7, k], b7 + b * weight[n + 7, k]
            for i, value in enumerate((a0, a1, a2, a3, a4, a5, a6, a7)):
                out[one, n + i] = value
            for i, value in enumerate((b0, b1, b2, b3, b4, b5, b6, b7)):
                out[two, n + i] = value


@compiled()
def _scale(row: Floats, eps: Any) -> Any:
    """Return the factor of an RMS norm for `row`, without its weights."""
    squares = np.float32(0)
    for i in range(len(row)):
        squares += row[i] * row[i]
    return np.float32(1) / np.sqrt(squares / np.float32(len(row)) + eps)


@compiled("void(f4[:,::1], f4[:,::1], f4[::1], f4, f4[:,::1])")
def add_norm(hidden: Floats, added: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """`hidden` [T, N] plus `added`, and in `out` its RMS norm."""
    for row in range(len(hidden)):
        for i in range(len(weight)):
            hidden[row, i] += added[row, i]
        scale = _scale(hidden[row], eps)
        for i in range(len(weight)):
            out[row, i] = hidden[row, i] * scale * weight[i]


@compiled(flags=("contract",))
def _exp(x: Any) -> Any:
    """Cephes' `expf`, with a relative error of at most 9e-8. The result is clamped to e^-87 and e^88."""
    x = np.float32(-87) if x < np.float32(-87) else np.float32(88) if x > np.float32(88) else x
    whole = np.floor(x * _LOG2E + np.float32(0.5))
    rest = x - whole * _LN2_HIGH - whole * _LN2_LOW
    power = np.float32(0)
    for factor in _EXP:
        power = power * rest + factor
    power = power * rest * rest + rest + np.float32(1)
    return power * np.int32((np.int32(whole) + 127) << 23).view(np.float32)


@compiled("void(f4[:,::1], f4[:,::1])")
def gated(parts: Floats, out: Floats) -> None:
    """SiLU of the first half of each row of `parts` [T, 2 N], times the second half, as `out` [T, N]."""
    size = out.shape[1]
    for row in range(len(out)):
        for i in range(size):
            gate = parts[row, i]
            out[row, i] = gate / (np.float32(1) + _exp(-gate)) * parts[row, size + i]


@compiled("void(f4[:,:,::1], f4[:,:,:,::1], f4[:,:,:,::1], i8[:,::1], f4[:,:,::1], f4[:,::1], f4)")
def place(parts: Floats, keys: Floats, values: Floats, where: Places, rope: Floats, norms: Floats, eps: float) -> None:
    """Apply norms and RoPE to queries and keys, and write keys and values to the cache. `parts`: [T, heads + 2 kv_heads,
    dim]. `rope`: cosines and sines [2, T, rotary_dim]; the first `rotary_dim` numbers of a head are rotated, by halves.
    `norms`: [2, dim], or [0, dim] if there are none."""
    kv_heads, dim = keys.shape[1], keys.shape[3]
    rotated, half = parts.shape[1] - kv_heads, rope.shape[2] // 2
    for row in range(len(parts)):
        slot, position = where[0, row], where[1, row]
        for head in range(rotated):
            some = parts[row, head]
            if len(norms):
                weight = norms[np.int64(head >= rotated - kv_heads)]
                scale = _scale(some, eps)
                for i in range(dim):
                    some[i] = some[i] * scale * weight[i]
            for i in range(half):
                one, other = some[i], some[half + i]
                some[i] = one * rope[0, row, i] - other * rope[1, row, i]
                some[half + i] = other * rope[0, row, half + i] + one * rope[1, row, half + i]
        for head in range(kv_heads):
            for i in range(dim):
                keys[slot, head, position, i] = parts[row, rotated - kv_heads + head, i]
                values[slot, head, position, i] = parts[row, rotated + head, i]


@compiled()
def _score(query: Floats, keys: Floats, scores: Floats) -> None:
    """`query` [groups, dim] times `keys` [n, dim], four at a time."""
    last = len(keys) - 1
    for one in range(0, last + 1, 4):
        two, three, four = min(one + 1, last), min(one + 2, last), min(one + 3, last)
        for group in range(len(query)):
            a = b = c = d = np.float32(0)
            for i in range(keys.shape[1]):
                number = query[group, i]
                a, b = a + number * keys[one, i], b + number * keys[two, i]
                c, d = c + number * keys[three, i], d + number * keys[four, i]
            scores[group, one], scores[group, two], scores[group, three], scores[group, four] = a, b, c, d


@compiled(flags=("reassoc", "nsz", "nnan"))
def _max_score(scores: Floats) -> Any:
    """Return the largest score; any score if one is a NaN."""
    most = scores[0]
    for i in range(len(scores)):
        most = max(most, scores[i])
    return most


@compiled()
def _softmax(scores: Floats, scale: Any) -> None:
    """Replace `scores` by the softmax of `scores` times `scale`."""
    most, total = _max_score(scores), np.float32(0)
    for i in range(len(scores)):
        scores[i] = _exp((scores[i] - most) * scale)
        total += scores[i]
    for i in range(len(scores)):
        scores[i] /= total


@compiled()
def _add_weighted(weights: Floats, values: Floats, out: Floats) -> None:
    """Add `weights` [groups, n] times `values` [n, dim] to `out`, four at a time."""
    fours = len(values) // 4 * 4
    for at in range(0, fours, 4):
        for group in range(len(out)):
            a, b, c, d = weights[group, at], weights[group, at + 1], weights[group, at + 2], weights[group, at + 3]
            for i in range(values.shape[1]):
                more = a * values[at, i] + b * values[at + 1, i] + c * values[at + 2, i] + d * values[at + 3, i]
                out[group, i] += more
    for at in range(fours, len(values)):
        for group in range(len(out)):
            for i in range(values.shape[1]):
                out[group, i] += weights[group, at] * values[at, i]


@compiled("void(f4[:,:,::1], f4[:,:,:,::1], f4[:,:,:,::1], i8[:,::1], f4[:,:,::1], f4, i8, i8, i8)")
def attend(
    parts: Floats,
    keys: Floats,
    values: Floats,
    where: Places,
    out: Floats,
    scale: float,
    window: int,
    low: int,
    top: int,
) -> None:
    """Attend from one new token of each sequence: the first T rows of `parts` [T or more, heads or more, dim]. `out`: [T,
    heads, dim of values]. Computes the key heads `low` to `top`; other threads compute the others."""
    groups = out.shape[1] // keys.shape[1]
    scores = np.empty((groups, keys.shape[2]), np.float32)
    for head in range(low, top):
        for row in range(len(out)):
            slot, end, root, shared = where[0, row], where[1, row] + 1, where[2, row], where[3, row]
            first = max(0, end - window)
            split = max(first, shared)
            spans = (root, first, split), (slot, split, end)
            query = parts[row, head * groups : (head + 1) * groups]
            mixed = out[row, head * groups : (head + 1) * groups]
            for source, begin, stop in spans:
                _score(query, keys[source, head, begin:stop], scores[:, begin - first :])
            for group in range(groups):
                _softmax(scores[group, : end - first], scale)
                for i in range(values.shape[3]):
                    mixed[group, i] = 0
            for source, begin, stop in spans:
                _add_weighted(scores[:, begin - first :], values[source, head, begin:stop], mixed)
