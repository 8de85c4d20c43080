"""The packing plan: samples spread over data-parallel ranks and packed into microbatches, the same on all ranks.

1. Every sample is in one microbatch of one rank. Ranks have equal numbers of microbatches, some only with padding.
2. Samples with a common prefix stay together if memory and balance allow it, so that the prefix is computed once.
3. Token limits and work count the padding to `alignment`. Memory limits the tokens of a microbatch. Work is balanced."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from agentrl.errors import TrainError
from agentrl.train.tree import SharedPrefixes, Tree

Microbatch = tuple[int, ...]  # sample indices, in the order in which they are packed
Bundle = list[int]  # places in the prefix order of samples that are kept together


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """The assignment of samples to ranks and microbatches."""

    ranks: tuple[tuple[Microbatch, ...], ...]  # `ranks[r][m]` is microbatch m of rank r; all ranks have as many
    alignment: int = 1  # every node of a microbatch's tree is padded to a multiple of this
    shares: bool = False  # true if common prefixes are computed once
    tokens: int = 0  # number of tokens of all samples
    distinct: int = 0  # number of tokens if all samples were in one tree, with every common prefix once


def make_plan(
    lengths: Sequence[int],
    data_parallel_size: int,
    *,
    prefixes: SharedPrefixes | None = None,
    max_tokens: int | None = None,
    micro_batch_size: int = 1,
    alignment: int = 1,
    balance: bool = True,
    attention_crossover: int | None = None,
) -> PackingPlan:
    """Spread samples over ranks and pack them into microbatches. Raises TrainError: no samples, or one without tokens.

    Args:
        lengths: [S] tokens of each sample.
        prefixes: common prefixes of the samples; with None nothing is shared.
        max_tokens: pack up to this many tokens (padding included) into a microbatch, by first-fit decreasing; a longer
            sample has its own microbatch. None: at most `micro_batch_size` samples.
        balance: balance the work over the ranks; if false, the ranks take bundles in turn.
        attention_crossover: length at which a sample's attention costs as much as the rest. None: attention costs 0."""
    if not lengths or min(lengths) < 1:
        raise TrainError(f"packing needs samples with at least one token each, got lengths {list(lengths)[:8]}")
    known = prefixes or SharedPrefixes.none(len(lengths))
    tree = Tree.of(lengths, known)
    costs = _Costs(lengths, known, tree, alignment, attention_crossover)
    share = costs.all_work() / (2 * data_parallel_size) if data_parallel_size > 1 and balance else float("inf")
    bundles = costs.bundles(max_tokens, micro_batch_size, share)
    work = [costs.work(bundle) for bundle in bundles]
    if balance:
        shares = balanced_partition(work, data_parallel_size, equal_size=max_tokens is None)
    else:
        shares = [list(range(rank, len(bundles), data_parallel_size)) for rank in range(data_parallel_size)]
    if max_tokens is None:
        sizes, capacity = [len(bundle) for bundle in bundles], micro_batch_size
    else:
        sizes, capacity = [costs.tokens(bundle) for bundle in bundles], max_tokens
    bins = [[[bundles[b] for b in bin_] for bin_ in first_fit_decreasing(own, sizes, capacity)] for own in shares]
    most = max(map(len, bins))
    ranks = tuple(tuple(costs.samples(mb) for mb in _split_up(own, costs, most)) for own in bins)
    return PackingPlan(ranks, alignment, prefixes is not None, sum(lengths), tree.tokens)


class _Costs:
    """The costs of samples, which are in prefix order. A sample reuses the prefix that it shares with the sample before it."""

    def __init__(
        self, lengths: Sequence[int], prefixes: SharedPrefixes, tree: Tree, alignment: int, crossover: int | None
    ) -> None:
        self.order, self.shared = prefixes.order, prefixes.shared
        starts = {node.of: node.start for node in reversed(tree.nodes)}
        self.reused = [starts.get(i, lengths[i]) for i in self.order]  # less than `shared` if the tree branches earlier
        self.lengths, self.alignment, self.crossover = [lengths[i] for i in self.order], alignment, crossover

    def tokens(self, bundle: Bundle) -> int:
        """Return the tokens of a bundle of neighbouring samples. The first sample counts in full."""
        return sum(self._tokens(at, 0 if at == bundle[0] else self.reused[at]) for at in bundle)

    def work(self, bundle: Bundle) -> int:
        return sum(self._work(at, 0 if at == bundle[0] else self.reused[at]) for at in bundle)

    def all_work(self) -> int:
        return sum(map(self._work, range(len(self.order)), self.reused))

    def samples(self, bundles: Sequence[Bundle]) -> Microbatch:
        return tuple(self.order[at] for bundle in bundles for at in bundle)

    def bundles(self, max_tokens: int | None, most_samples: int, most_work: float) -> list[Bundle]:
        """Return runs of samples with common prefixes. A run that is too large is cut where its samples share least."""
        pending, out = [list(range(len(self.order)))], []
        while pending:
            bundle = pending.pop()
            fits = len(bundle) <= most_samples if max_tokens is None else self.tokens(bundle) <= max_tokens
            whole = all(self.shared[at] for at in bundle[1:])
            if len(bundle) == 1 or (fits and whole and self.work(bundle) <= most_work):
                out.append(bundle)
            else:
                pending += reversed(self.halves(bundle))
        return out

    def halves(self, bundle: Bundle) -> list[Bundle]:
        """Cut a bundle of several samples where they share least; of equal places, take the nearest to the middle."""
        middle = len(bundle) / 2
        cut = min(range(1, len(bundle)), key=lambda i: (self.shared[bundle[i]], abs(i - middle)))
        return [bundle[:cut], bundle[cut:]]

    def _tokens(self, at: int, shared: int) -> int:
        return padded(self.lengths[at] - shared, self.alignment)

    def _work(self, at: int, shared: int) -> int:
        own = self._tokens(at, shared)
        return own if self.crossover is None else own * (self.crossover + own + 2 * shared)


def padded(length: int, alignment: int) -> int:
    """Return `length` rounded up to a multiple of `alignment`."""
    return -(-int(length) // alignment) * alignment


def balanced_partition(sizes: Sequence[int], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Divide items of these sizes [S] into `parts` lists with nearly equal sums.

    The largest differencing method (Karmarkar and Karp 1982, UCB/CSD 82/113) starts with one partial solution per item.
    It keeps merging the two with the largest spread, the heaviest part of one with the lightest of the other. With
    `equal_size` the lists' lengths differ by at most one. Ties are broken deterministically. Returns `parts` lists of
    item indices, each ascending; lists may be empty."""
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    per_start = parts if equal_size else 1
    number = count()
    heap = []
    for at in range(0, len(order), per_start):
        start: list[tuple[int, list[int]]] = [(sizes[i], [i]) for i in order[at : at + per_start]]
        start += [(0, [])] * (parts - len(start))
        heap.append((-(start[0][0] - start[-1][0]), next(number), start))
    heapify(heap)
    while len(heap) > 1:
        _, _, heavy = heappop(heap)
        _, _, light = heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(heavy, reversed(light), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heappush(heap, (-(merged[0][0] - merged[-1][0]), next(number), merged))
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]


def first_fit_decreasing(items: Sequence[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack `items` into few bins of at most `capacity`, longest first (at most 11/9 of the optimal number of bins plus
    6/9, Dosa 2007). An item above the capacity has its own bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(items, key=lambda i: (-sizes[i], i)):
        for b, left in enumerate(room):
            if sizes[item] <= left:
                bins[b].append(item)
                room[b] -= sizes[item]
                break
        else:
            bins.append([item])
            room.append(capacity - sizes[item])
    return bins


def _split_up(bins: list[list[Bundle]], costs: _Costs, wanted: int) -> list[list[Bundle]]:
    """Halve the heaviest divisible bin until there are `wanted` bins. If none is divisible, add empty bins."""
    bins = list(bins)
    while len(bins) < wanted:
        divisible = [b for b in range(len(bins)) if sum(map(len, bins[b])) > 1]
        if not divisible:
            return bins + [[] for _ in range(wanted - len(bins))]
        heaviest = max(divisible, key=lambda b: sum(map(costs.work, bins[b])))
        whole = bins[heaviest]
        if len(whole) == 1:
            whole = costs.halves(whole[0])
        halves = balanced_partition([costs.work(bundle) for bundle in whole], 2)
        bins[heaviest : heaviest + 1] = [[whole[j] for j in half] for half in halves]
    return bins
