"""Who computes what: samples spread over data-parallel ranks and packed into microbatches.

1. Pure functions of the lengths and the layout: every rank computes the same plan and takes its own row.
2. Every sample is in exactly one microbatch of one rank, and all ranks have the same number of microbatches (their
   collectives must match). Where a rank has fewer samples than that, its last microbatches are empty and the
   backend runs a dummy sequence with weight 0 for them.
3. Samples in a microbatch lie one after the other, each padded to a multiple of `alignment` (what context and
   sequence parallelism need), and token counts here include that padding.
4. Memory bounds a microbatch, by its tokens; time evens out the ranks, by the work of their samples, in which attention
   grows with the square of the length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from agentrl.errors import TrainError
from agentrl.train.settings import TrainSettings

Microbatch = tuple[int, ...]
"""Sample indices, in the order in which they are packed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which samples each rank computes, in which microbatches.

    Attributes:
        ranks: `ranks[r][m]` is microbatch m of data-parallel rank r.
        lengths: tokens of each sample, without padding.
        alignment: every packed sample is padded to a multiple of this.
    """

    ranks: tuple[tuple[Microbatch, ...], ...]
    lengths: tuple[int, ...]
    alignment: int = 1

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each rank."""
        return len(self.ranks[0])

    def padded_length(self, sample: int) -> int:
        """Tokens that a sample takes in a microbatch."""
        return padded(self.lengths[sample], self.alignment)

    def rank_tokens(self) -> list[int]:
        """Tokens of each rank, padding included."""
        return [sum(map(self.padded_length, (i for mb in rank for i in mb))) for rank in self.ranks]


def plan(
    lengths: Sequence[int], settings: TrainSettings, data_parallel_size: int, attention_crossover: int | None = None
) -> Plan:
    """The plan that the settings ask for; `lengths` [S] are tokens per sample (`TrainBatch.lengths`)."""
    budget = None
    if settings.use_dynamic_batch_size and settings.max_tokens_per_gpu is not None:
        budget = settings.max_tokens_per_gpu * settings.context_parallel_size
    return make_plan(
        lengths,
        data_parallel_size,
        max_tokens=budget,
        micro_batch_size=settings.micro_batch_size,
        alignment=required_alignment(settings),
        balance=settings.balance_data,
        attention_crossover=attention_crossover,
    )


def required_alignment(settings: TrainSettings) -> int:
    """The multiple to which each sequence is padded.

    Context parallelism cuts a sequence into 2 * cp equal chunks (zigzag); sequence parallelism cuts each rank's
    share into tp parts.
    """
    cp, tp = settings.context_parallel_size, settings.tensor_model_parallel_size
    return (2 * cp if cp > 1 else 1) * (tp if settings.sequence_parallel else 1)


def make_plan(
    lengths: Sequence[int],
    data_parallel_size: int,
    *,
    max_tokens: int | None = None,
    micro_batch_size: int = 1,
    alignment: int = 1,
    balance: bool = True,
    attention_crossover: int | None = None,
) -> Plan:
    """Spread samples over ranks and pack each rank's samples into microbatches.

    Args:
        lengths: [S] tokens of each sample.
        data_parallel_size: number of ranks.
        max_tokens: pack up to this many tokens (padding included) into a microbatch, by first-fit decreasing; a
            longer sample has a microbatch of its own. None: exactly `micro_batch_size` samples, fewer in the last.
        micro_batch_size: samples per microbatch when `max_tokens` is None.
        alignment: see `Plan`.
        balance: even out work over the ranks; off deals the samples out in turn.
        attention_crossover: the length at which a sample's attention costs as much as everything else; None takes
            attention for free, so that work is tokens.

    Raises:
        TrainError: no samples, or a sample without tokens.
    """
    if not lengths or min(lengths) < 1:
        raise TrainError(f"packing needs samples with at least one token each, got lengths {list(lengths)[:8]}")
    sizes = [padded(n, alignment) for n in lengths]
    work = [size * (attention_crossover + size) for size in sizes] if attention_crossover is not None else sizes
    if balance:
        shares = balanced_partition(work, data_parallel_size, equal_size=max_tokens is None)
    else:
        shares = [list(range(rank, len(sizes), data_parallel_size)) for rank in range(data_parallel_size)]
    if max_tokens is None:
        size = micro_batch_size
        bins = [[share[at : at + size] for at in range(0, len(share), size)] for share in shares]
    else:
        bins = [first_fit_decreasing(share, sizes, max_tokens) for share in shares]
    most = max(map(len, bins))
    ranks = tuple(tuple(tuple(mb) for mb in _split_up(own, work, most)) for own in bins)
    return Plan(ranks, tuple(int(n) for n in lengths), alignment)


def padded(length: int, alignment: int) -> int:
    """`length` rounded up to a multiple of `alignment`."""
    return -(-int(length) // alignment) * alignment


def balanced_partition(sizes: Sequence[int], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Divide items into `parts` lists with sums as even as Karmarkar and Karp's differencing makes them.

    The largest differencing method (Karmarkar and Karp 1982, UCB/CSD 82/113): start with one partial solution per
    item, and keep merging the two with the largest spread, the heaviest part of one with the lightest of the other.

    Args:
        sizes: [S] non-negative weights.
        parts: number of lists.
        equal_size: the lists' lengths differ by at most one.

    Returns:
        `parts` lists of item indices, each ascending; lists may be empty. Ties fall the same way every time.
    """
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
    """Pack `items` into few bins of at most `capacity`: longest first, each into the first bin with room.

    At most 11/9 of the optimal number of bins plus 6/9 (Dosa 2007). An item above the capacity has its own bin.
    """
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


def _split_up(bins: list[list[int]], work: Sequence[int], wanted: int) -> list[list[int]]:
    """Reach `wanted` bins by halving the heaviest one that can be; then by empty ones. Never overfills a bin."""
    bins = [list(b) for b in bins]
    while len(bins) < wanted:
        divisible = [b for b in range(len(bins)) if len(bins[b]) > 1]
        if not divisible:
            return bins + [[] for _ in range(wanted - len(bins))]
        heaviest = max(divisible, key=lambda b: sum(work[i] for i in bins[b]))
        whole = bins[heaviest]
        halves = balanced_partition([work[i] for i in whole], 2)
        bins[heaviest : heaviest + 1] = [[whole[j] for j in half] for half in halves]
    return bins
