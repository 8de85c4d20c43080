"""Seeded damage to real examples, and the loop that counts the outcomes.

1. `of_bytes` and `of_tree` change one to three things: bits, pieces, length; values, types, keys, depth.
2. `fuzz` reads each mutant under a deadline. The outcome is a refusal (a documented error with a message of suitable
   length) or an accepted value, which `accept` must find valid. Any other outcome fails, once for each kind, with the
   number that reproduces the mutant.
"""

from __future__ import annotations

import os
import random
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from agentrl.errors import AgentRLError

M = TypeVar("M")
T = TypeVar("T")

NIGHTLY = int(os.environ.get("AGENTRL_FUZZ", "10000"))
"""Mutants of each kind in the nightly run."""

_nightly = pytest.param(NIGHTLY, marks=[pytest.mark.slow, pytest.mark.timeout(7200)], id="nightly")
counts = pytest.mark.parametrize("count", [200, _nightly])
few = pytest.mark.parametrize("count", [80, _nightly])
"""The same for mutants that take long to read."""

DEADLINE = 20.0
"""Maximum seconds for one mutant on a busy machine."""

ODD_TEXTS = (
    *(
        "",
        " ",
        "\0",
        "\ud800",
        "é\u2028",
        "none",
        "null",
        "true",
        "nan",
        "-inf",
        "1e400",
        "0x",
        "2020-99-99",
        "~nobody/x",
    ),
    *(
        "[" * 3000,
        "{" * 500,
        "a" * 5000,
        "9" * 5000,
        "x\ny: 1",
        "!!float x",
        "*a",
        "&a",
        "<<",
        "{{ 7 * 7 }}",
        "../../x",
    ),
)
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        255,
        2**31,
        -(2**31) - 1,
        2**63,
        2**64,
        10**40,
        0.0,
        -0.0,
        0.5,
        1e-400,
        1e39,
        -1e308,
    ),
    *(3.0, [], {}, [[]], [None], {"": None}, {"a": {}}, [1, "a"], ["a", "b"], [{"role": "user"}], {"role": "user"}),
    *ODD_TEXTS,
)


def deep(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if depth % 2 else {"a": value}
    return value


def of_bytes(rng: random.Random, data: bytes, words: tuple[bytes, ...] = ()) -> bytes:
    """Return `data` with one to three pieces changed."""
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randrange(len(data) + 1), int(rng.paretovariate(0.7))
        match rng.randrange(7 if words else 6):
            case 0 if data:
                at %= len(data)
                data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
            case 1:
                data = data[:at] + rng.randbytes(min(length, 64)) + data[at + min(length, 64) :]
            case 2:
                data = data[:at] + data[at + length :]
            case 3:
                data = data[:at]
            case 4:
                other = rng.randrange(len(data) + 1)
                data = data[:at] + data[other : other + length] + data[at:]
            case 5:
                data = data[:at] + bytes(min(length, 4096)) + data[at + length :]
            case _ if words:
                data = data[:at] + rng.choice(words) + data[at + rng.choice((0, 0, length)) :]
    return data


def of_tree(rng: random.Random, tree: Any, odd: tuple[Any, ...] = ODD) -> Any:
    """Return a copy of a JSON value with one to three nodes changed."""
    root = {"": tree}
    for _ in range(rng.randint(1, 3)):
        root = _copied(root)
        if not (places := list(_places(root))):
            break
        holder, key = rng.choice(places)
        match rng.randrange(8):
            case 0 if len(places) > 1:
                del holder[key]
            case 1:
                other, name = rng.choice(places)
                holder[key] = _copied(other[name])
            case 2:
                holder[key] = deep(rng.choice((3, 121, 260, 261, 700)))
            case 3:
                holder[key] = [_copied(holder[key])] * rng.randrange(4)
            case 4 if isinstance(holder, dict):
                holder[rng.choice([str(odd) for odd in ODD_TEXTS])] = holder.pop(key)
            case 5 if isinstance(holder[key], (int, float)):
                holder[key] = holder[key] + rng.choice((-1, 1, 0.5, 1000, -(10**12)))
            case 6 if isinstance(holder[key], str):
                holder[key] = of_bytes(rng, holder[key].encode("utf-8", "replace")).decode("utf-8", "replace")
            case _:
                holder[key] = _copied(rng.choice(odd))
    return root.get("")


def _copied(value: Any, depth: int = 0) -> Any:
    """Copy a value down to a depth of 50."""
    if depth > 50 or not isinstance(value, (dict, list, tuple)):
        return value
    if isinstance(value, dict):
        return {key: _copied(item, depth + 1) for key, item in value.items()}
    return [_copied(item, depth + 1) for item in value]


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a value; of long lists only some."""
    if depth > 50 or not isinstance(value, (dict, list)):
        return
    for key in list(value) if isinstance(value, dict) else range(0, len(value), 1 + len(value) // 20):
        yield value, key
        yield from _places(value[key], depth + 1)


@contextmanager
def deadline(seconds: float = DEADLINE) -> Iterator[None]:
    """Raise `Hang` in the block if it takes longer."""

    def ring(signum: int, frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Hang(BaseException):
    """Reading a mutant did not end."""


def fuzz(
    count: int, make: Callable[[random.Random], M], read: Callable[[M], T], accept: Callable[[T], None]
) -> Counter[str]:
    """Read `count` mutants. Returns how many were accepted, and how many were refused with each error."""
    found: Counter[str] = Counter()
    failures: dict[str, str] = {}
    for number in range(count):
        mutant = make(random.Random(number))
        try:
            with deadline():
                found[_outcome(mutant, read, accept)] += 1
        except (Exception, Hang) as error:  # noqa: BLE001
            last = traceback.extract_tb(error.__traceback__)[-1]
            found["FAILED"] += 1
            kind = f"{type(error).__name__} at {last.filename}:{last.lineno}"
            said = "".join(traceback.format_exception(error)[-6:])
            failures.setdefault(kind, f"mutant {number}: {error!s:.300}\n{said}")
    print(dict(found))  # noqa: T201
    assert not failures, f"{dict(found)}\n" + "\n".join(f"--- {kind}: {said}" for kind, said in failures.items())
    return found


def _outcome(mutant: M, read: Callable[[M], T], accept: Callable[[T], None]) -> str:
    try:
        value = read(mutant)
    except AgentRLError as error:
        said, kind = str(error), type(error).__name__
    else:
        accept(value)
        return "accepted"
    assert 10 < len(said) < 20_000, f"a message without words, or without an end: {said:.200}"
    return kind
