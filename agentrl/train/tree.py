"""Sequences as a tree: what several of them begin with is there once.

1. Siblings of a group have their prompt in common, split trajectories their first turns, and all of them perhaps a system
   prompt. Causal attention computes the same for a common beginning whatever follows, so it is computed once.
2. A node is a run of tokens. Its sequence is the nodes from the root to it; nodes lie in depth-first order, so that what
   descends from a node follows it without a gap.
3. A common beginning of less than `LEAST` tokens is not worth a node: it stays copied.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

LEAST = 16
"""Tokens that must be in common; below this an attention call more costs as much as the copies."""

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Sequences in an order in which those that begin alike are neighbours.

    Attributes:
        order: [S] numbers of the sequences.
        shared: [S] tokens that the sequence at this place has in common with the one before it; 0 at the first place, and
            where it is less than `LEAST`.
    """

    order: tuple[int, ...]
    shared: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Sequence[Ids]) -> "Prefixes":
        """Find what the sequences share."""
        keys = [ids.astype(">u4").tobytes() for ids in sequences]
        order = sorted(range(len(keys)), key=lambda i: (keys[i], i))
        shared = [0] + [_common(sequences[a], sequences[b]) for a, b in itertools.pairwise(order)]
        return cls(tuple(order), tuple(n if n >= LEAST else 0 for n in shared[: len(order)]))

    @classmethod
    def none(cls, count: int) -> "Prefixes":
        """For `count` sequences of which nothing is to be shared."""
        return cls(tuple(range(count)), (0,) * count)


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens `start` to `end` (positions, in all sequences through it) of the sequence number `of`.

    `last` is the number of the last node that descends from this one, its own if none does.
    """

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
    def of(cls, lengths: Sequence[int], prefixes: Prefixes) -> "Tree":
        """The tree of sequences with these lengths [S]."""
        return _Growth(lengths, prefixes).grown()


class _Growth:
    def __init__(self, lengths: Sequence[int], prefixes: Prefixes) -> None:
        self.lengths, self.prefixes = lengths, prefixes
        self.nodes: list[Node] = []
        self.paths: list[tuple[int, ...]] = [()] * len(lengths)

    def grown(self) -> Tree:
        if self.lengths:
            self._branches(0, len(self.lengths), 0, ())
        return Tree(tuple(self.nodes), tuple(self.paths))

    def _branches(self, first: int, end: int, depth: int, parents: tuple[int, ...]) -> None:
        """The sequences at places `first` to `end` have `depth` tokens in common: one branch for each way they go on."""
        shared = self.prefixes.shared
        cuts = [first, *(i for i in range(first + 1, end) if shared[i] < depth + LEAST), end]
        for a, b in itertools.pairwise(cuts):
            self._branch(a, b, depth, parents)

    def _branch(self, first: int, end: int, depth: int, parents: tuple[int, ...]) -> None:
        sequence = self.prefixes.order[first]
        alone = end == first + 1
        until = self.lengths[sequence] if alone else min(self.prefixes.shared[first + 1 : end])
        if until > depth:
            number = len(self.nodes)
            self.nodes.append(Node(sequence, depth, until, parents, number))
            parents = (*parents, number)
        if alone:
            self.paths[sequence] = parents
            return
        self._branches(first, end, until, parents)
        made = self.nodes[parents[-1]]
        self.nodes[parents[-1]] = Node(made.of, made.start, made.end, made.parents, len(self.nodes) - 1)


def _common(a: Ids, b: Ids) -> int:
    """How many tokens two sequences begin with in common."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
