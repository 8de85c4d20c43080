"""Sequences as a tree: what several of them begin with is there once.

1. Siblings of a group have their prompt in common, split trajectories their first turns, and all of them perhaps a system
   prompt. Causal attention computes the same for a common beginning whatever follows, so it is computed once.
2. A node is a run of tokens. Its sequence is the nodes from the root to it; nodes lie in depth-first order, so that what
   descends from a node follows it without a gap.
3. A common beginning of less than `LEAST` tokens is not worth a node: it stays copied."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

LEAST = 16  # tokens that must be in common; below this an attention call more costs as much as the copies
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Sequences in an order in which sequences that begin alike are neighbours."""

    order: tuple[int, ...]  # [S] numbers of the sequences
    shared: tuple[int, ...]
    """[S] tokens that the sequence at this place has in common with the one before it; 0 at the first place, and below
    `LEAST`."""

    @classmethod
    def of(cls, sequences: Sequence[Ids]) -> "SharedPrefixes":
        """Find what the sequences share."""
        keys = [ids.astype(">u4").tobytes() for ids in sequences]
        order = sorted(range(len(keys)), key=lambda i: (keys[i], i))
        shared = [0] + [_common(sequences[a], sequences[b]) for a, b in itertools.pairwise(order)]
        return cls(tuple(order), tuple(n if n >= LEAST else 0 for n in shared[: len(order)]))

    @classmethod
    def none(cls, count: int) -> "SharedPrefixes":
        """For `count` sequences of which nothing is to be shared."""
        return cls(tuple(range(count)), (0,) * count)


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens `start` to `end` (positions, in all sequences through it) of the sequence number `of`. `last` is the last
    node that descends from this one, its own number if none does."""

    of: int
    start: int
    end: int
    parents: tuple[int, ...]
    last: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Tree:
    """The nodes in depth-first order, and for each of S sequences the numbers of the nodes that it runs through."""

    nodes: tuple[Node, ...]
    paths: tuple[tuple[int, ...], ...]

    @cached_property
    def tokens(self) -> int:
        """Tokens of all nodes: what is computed."""
        return sum(map(len, self.nodes))

    @classmethod
    def of(cls, lengths: Sequence[int], prefixes: SharedPrefixes) -> "Tree":
        """The tree of sequences with these lengths [S]."""
        nodes: list[tuple[int, int, int, tuple[int, ...]]] = []
        paths: list[tuple[int, ...]] = [()] * len(lengths)
        pending = list(_branches(prefixes.shared, 0, len(lengths), 0, ()))
        while pending:  # no recursion: a trajectory's samples may be as deep as it has turns
            first, end, depth, parents = pending.pop()
            sequence, alone = prefixes.order[first], end == first + 1
            until = lengths[sequence] if alone else min(prefixes.shared[first + 1 : end])
            if until > depth:
                nodes.append((sequence, depth, until, parents))
                parents = (*parents, len(nodes) - 1)
            if alone:
                paths[sequence] = parents
            else:
                pending += _branches(prefixes.shared, first, end, until, parents)
        last = list(range(len(nodes)))
        for number, (*_, parents) in enumerate(nodes):
            for parent in parents:
                last[parent] = number
        return cls(tuple(Node(*node, end) for node, end in zip(nodes, last, strict=True)), tuple(paths))


_Branch = tuple[int, int, int, tuple[int, ...]]
"""The bounds of the sequences' places, the number of tokens that they have in common, and the nodes of these tokens."""


def _branches(shared: Sequence[int], first: int, end: int, depth: int, parents: tuple[int, ...]) -> Iterator[_Branch]:
    """One for each way that the sequences at places `first` to `end` go on after `depth` tokens in common, the last first."""
    for at in range(end - 1, first - 1, -1):
        if at == first or shared[at] < depth + LEAST:
            yield at, end, depth, parents
            end = at


def _common(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
