"""Sequences as a tree, in which a prefix of several sequences exists once.

1. Samples of a group share a prompt, samples of a split trajectory share turns, and all may share a system prompt.
   With causal attention a prefix does not depend on the tokens after it, so a shared prefix is computed once.
2. A node is a run of tokens, a sequence a path from a root. The order is depth-first: descendants follow a node.
3. A shared prefix of fewer than `LEAST` tokens gets no node: each sequence has its own copy."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

LEAST = 16  # minimum tokens of a shared prefix; for fewer, one more attention call costs as much as the copies
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """An order of sequences in which sequences with a common prefix are neighbours."""

    order: tuple[int, ...]  # [S] indices of the sequences
    shared: tuple[int, ...]
    """[S] length of the prefix shared with the sequence before; 0 at the first place, and if below `LEAST`."""

    @classmethod
    def of(cls, sequences: Sequence[Ids]) -> "SharedPrefixes":
        """Find the shared prefixes of sequences."""
        keys = [ids.astype(">u4").tobytes() for ids in sequences]
        order = sorted(range(len(keys)), key=lambda i: (keys[i], i))
        shared = [0] + [_common(sequences[a], sequences[b]) for a, b in itertools.pairwise(order)]
        return cls(tuple(order), tuple(n if n >= LEAST else 0 for n in shared[: len(order)]))

    @classmethod
    def none(cls, count: int) -> "SharedPrefixes":
        """Return the order of `count` sequences that share nothing."""
        return cls(tuple(range(count)), (0,) * count)


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens `start` to `end` of sequence `of`; the positions are the same in all sequences through the node. `parents`
    are its ancestors, root first. `last` is its last descendant, or the node itself if it has none."""

    of: int
    start: int
    end: int
    parents: tuple[int, ...]
    last: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Tree:
    """The nodes in depth-first order, and for each of S sequences the indices of the nodes on its path."""

    nodes: tuple[Node, ...]
    paths: tuple[tuple[int, ...], ...]

    @cached_property
    def tokens(self) -> int:
        """Return the number of tokens of all nodes, which are the computed ones."""
        return sum(map(len, self.nodes))

    @classmethod
    def of(cls, lengths: Sequence[int], prefixes: SharedPrefixes) -> "Tree":
        """Build the tree of sequences with these lengths [S]."""
        nodes: list[tuple[int, int, int, tuple[int, ...]]] = []
        paths: list[tuple[int, ...]] = [()] * len(lengths)
        pending = list(_branches(prefixes.shared, 0, len(lengths), 0, ()))
        while pending:  # no recursion: the tree may be as deep as a trajectory has turns
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
"""The bounds of the sequences' places, the number of tokens that they share so far, and the nodes of these tokens."""


def _branches(shared: Sequence[int], first: int, end: int, depth: int, parents: tuple[int, ...]) -> Iterator[_Branch]:
    """Yield the branches of the sequences at places `first` to `end` after `depth` shared tokens, the last first."""
    for at in range(end - 1, first - 1, -1):
        if at == first or shared[at] < depth + LEAST:
            yield at, end, depth, parents
            end = at


def _common(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
