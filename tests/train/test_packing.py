"""Packing plans: invariants, and their quality against simpler plans and the optimum."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import TrainError
from agentrl.sample import Sample
from agentrl.train.batch import TrainBatch
from agentrl.train.microbatches import Packer
from agentrl.train.model_state import ModelState
from agentrl.train.packing import PackingPlan, balanced_partition, first_fit_decreasing, make_plan, padded
from agentrl.train.settings import TrainSettings
from agentrl.train.tree import LEAST, Ids, SharedPrefixes, Tree
from tests.train.test_tree import sequences

lengths_st = st.lists(st.integers(1, 200), min_size=1, max_size=40)


def test_a_microbatch_without_samples_has_no_routing() -> None:
    samples = [
        Sample(index=at, tokens=[1, 2, 3], response_length=1, loss_mask=[1], rollout_log_probs=[-1.0])
        for at in range(3)
    ]
    for sample in samples:
        sample.reward = 1.0
    batch = replace(TrainBatch.from_samples([samples]), routed_experts=(np.zeros((3, 4), np.int16),) * 3)
    plan = make_plan([3, 3, 3], 2, micro_batch_size=1)
    (short,) = (number for number, own in enumerate(plan.ranks) if () in own)
    ranks: Any = SimpleNamespace(dp_rank=short, cp=1, cp_rank=0)
    full, empty = Packer(ranks, torch.device("cpu"), routed=True).microbatches(batch, plan, "trained")
    assert full.routing is not None
    assert (empty.samples, empty.routing) == ((), None)


@given(
    lengths_st,
    st.integers(1, 5),
    st.sampled_from([None, 64, 200, 1000]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 8]),
    st.booleans(),
)
def test_plans_hold_their_promises(
    lengths: list[int], ranks: int, max_tokens: int | None, size: int, alignment: int, balance: bool
) -> None:
    made = make_plan(lengths, ranks, max_tokens=max_tokens, micro_batch_size=size, alignment=alignment, balance=balance)
    assert len(made.ranks) == ranks
    assert {len(rank) for rank in made.ranks} == {len(made.ranks[0])}
    placed = sorted(i for rank in made.ranks for microbatch in rank for i in microbatch)
    assert placed == list(range(len(lengths)))
    for rank in made.ranks:
        for microbatch in rank:
            tokens = sum(padded(lengths[i], alignment) for i in microbatch)
            if max_tokens is None:
                assert len(microbatch) <= size
            else:
                assert tokens <= max_tokens or len(microbatch) == 1


@given(lengths_st, st.integers(1, 5))
def test_fixed_microbatches_deal_out_equal_numbers(lengths: list[int], ranks: int) -> None:
    made = make_plan(lengths, ranks, micro_batch_size=1)
    counts = [sum(map(len, rank)) for rank in made.ranks]
    assert max(counts) - min(counts) <= 1
    assert len(made.ranks[0]) == -(-len(lengths) // ranks)


def work(length: int, crossover: int) -> int:
    """Return the cost of a sample: `crossover` for each token (all but attention), and its attention."""
    return length * crossover + length * length


@given(lengths_st, st.integers(2, 5), st.integers(1, 300))
def test_work_is_as_even_as_its_largest_item(lengths: list[int], ranks: int, crossover: int) -> None:
    made = make_plan(lengths, ranks, max_tokens=256, attention_crossover=crossover)
    loads = [sum(work(lengths[i], crossover) for mb in rank for i in mb) for rank in made.ranks]
    assert max(loads) - min(loads) <= max(work(n, crossover) for n in lengths)


def rank_tokens(lengths: list[int], made: PackingPlan) -> list[int]:
    """Return the tokens of each rank."""
    return [sum(lengths[i] for mb in rank for i in mb) for rank in made.ranks]


def test_a_long_sample_counts_for_more_than_its_tokens() -> None:
    lengths = [400] + [100] * 8
    assert rank_tokens(lengths, make_plan(lengths, 2, max_tokens=800)) == [600, 600]
    by_work = make_plan(lengths, 2, max_tokens=800, attention_crossover=1)
    assert sorted(rank_tokens(lengths, by_work)) == [400, 800]


@given(lengths_st, st.integers(1, 300))
def test_one_rank_packs_the_same_whatever_attention_costs(lengths: list[int], crossover: int) -> None:
    for tokens in (None, 200):
        want = make_plan(lengths, 1, max_tokens=tokens)
        assert make_plan(lengths, 1, max_tokens=tokens, attention_crossover=crossover) == want


@given(lengths_st, st.integers(1, 4))
def test_empty_microbatches_only_where_samples_run_out(lengths: list[int], ranks: int) -> None:
    made = make_plan(lengths, ranks, max_tokens=256)
    for rank in made.ranks:
        if any(not microbatch for microbatch in rank):
            assert all(len(microbatch) <= 1 for microbatch in rank)


@given(lengths_st, st.integers(1, 5), st.booleans())
def test_partition_covers_everything_once(sizes: list[int], parts: int, equal_size: bool) -> None:
    shares = balanced_partition(sizes, parts, equal_size=equal_size)
    assert len(shares) == parts
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    if equal_size:
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(lengths_st, st.integers(2, 5))
def test_partition_spread_is_at_most_the_largest_item(sizes: list[int], parts: int) -> None:
    sums = [sum(sizes[i] for i in share) for share in balanced_partition(sizes, parts)]
    assert max(sums) - min(sums) <= max(sizes)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=8))
def test_two_way_partition_is_near_the_optimum(sizes: list[int]) -> None:
    total = sum(sizes)
    best = min(abs(total - 2 * sum(chosen)) for k in range(len(sizes)) for chosen in itertools.combinations(sizes, k))
    left, right = (sum(sizes[i] for i in share) for share in balanced_partition(sizes, 2))
    heavier, optimum = max(left, right), (total + best) / 2
    assert heavier <= optimum * 7 / 6 + 1e-9  # the bound of Fischetti and Martello (1987) for two parts


def test_textbook_example() -> None:
    shares = balanced_partition([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in share) for share in shares) == [14, 16]


@given(lengths_st, st.integers(50, 300))
def test_first_fit_decreasing_keeps_its_bound(sizes: list[int], capacity: int) -> None:
    bins = first_fit_decreasing(range(len(sizes)), sizes, capacity)
    assert all(sum(sizes[i] for i in b) <= capacity or len(b) == 1 for b in bins)
    fitting = [n for n in sizes if n <= capacity]
    above = len(sizes) - len(fitting)
    # No two half-full bins can remain: the content of the later one would have fitted into the earlier one.
    half_full = [b for b in bins if sum(sizes[i] for i in b) * 2 <= capacity]
    assert len(half_full) <= 1
    assert len(bins) - above <= max(1, 2 * sum(fitting) / capacity + 1)


def test_bins_may_be_exactly_full() -> None:
    assert first_fit_decreasing([0, 1, 2], [3, 5, 2], 5) == [[1], [0, 2]]


def test_a_long_sample_goes_alone() -> None:
    made = make_plan([10, 500, 20], 1, max_tokens=64)
    assert (1,) in made.ranks[0]
    assert len(made.ranks[0]) == 2


def test_fewer_samples_than_ranks() -> None:
    made = make_plan([5], 3, max_tokens=64)
    assert sorted(made.ranks) == [((),), ((),), ((0,),)]


def test_the_plan_is_the_same_every_time() -> None:
    lengths = [7, 7, 7, 3, 3, 9, 1, 7]
    assert make_plan(lengths, 2, max_tokens=16) == make_plan(list(lengths), 2, max_tokens=16)


def computed(found: list[Ids], samples: tuple[int, ...]) -> int:
    """Return the tokens of a microbatch's tree."""
    chosen = [found[i] for i in samples]
    return Tree.of([len(ids) for ids in chosen], SharedPrefixes.of(chosen)).tokens


@given(sequences(), st.integers(1, 4), st.sampled_from([None, 40, 100, 1000]), st.integers(1, 4))
def test_plans_of_trees_hold_the_same_promises(found: list[Ids], ranks: int, max_tokens: int | None, size: int) -> None:
    lengths, prefixes = [len(ids) for ids in found], SharedPrefixes.of(found)
    made = make_plan(lengths, ranks, prefixes=prefixes, max_tokens=max_tokens, micro_batch_size=size)
    assert sorted(i for rank in made.ranks for mb in rank for i in mb) == list(range(len(found)))
    assert {len(rank) for rank in made.ranks} == {len(made.ranks[0])}
    for microbatch in (mb for rank in made.ranks for mb in rank):
        fits = len(microbatch) <= size if max_tokens is None else computed(found, microbatch) <= max_tokens + SLACK
        assert fits or len(microbatch) == 1


SLACK = 9 * LEAST
"""Prefixes that are too short for a node are copied, at most one for each sample."""


def groups(count: int, size: int, prompt: int, response: int) -> list[Ids]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, prompt) for _ in range(count)]
    return [np.concatenate([p, rng.integers(0, 1000, response)]).astype(np.int32) for _ in range(size) for p in prompts]


@pytest.mark.parametrize(("ranks", "budget"), [(1, 10_000), (1, 500), (2, 500), (4, 500)])
def test_a_group_stays_together_where_it_fits(ranks: int, budget: int) -> None:
    found = groups(8, 8, 100, 40)
    made = make_plan([len(ids) for ids in found], ranks, prefixes=SharedPrefixes.of(found), max_tokens=budget)
    total = sum(computed(found, mb) for rank in made.ranks for mb in rank)
    assert total == 8 * (100 + 8 * 40)
    each = [sum(computed(found, mb) for mb in rank) for rank in made.ranks]
    assert max(each) == min(each)


@given(st.integers(3, 10), st.integers(0, 2**16))
def test_groups_of_one_system_prompt_never_overfill_a_microbatch(members: int, seed: int) -> None:
    """A microbatch's first sample computes its prefix, even if earlier samples in other microbatches have it too."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, 500, 100)
    found = [np.concatenate([system, rng.integers(0, 500, int(n))]).astype(np.int32) for n in rng.integers(20, 90, 12)]
    lengths, prefixes = [len(ids) for ids in found], SharedPrefixes.of(found)
    budget = 100 + 40 * members
    made = make_plan(lengths, 1, prefixes=prefixes, max_tokens=budget)
    for microbatch in made.ranks[0]:
        assert len(microbatch) == 1 or computed(found, microbatch) <= budget


def test_a_group_is_cut_where_memory_or_an_even_share_asks_for_it() -> None:
    found = groups(1, 8, 100, 40)
    lengths, prefixes = [len(ids) for ids in found], SharedPrefixes.of(found)
    small = make_plan(lengths, 1, prefixes=prefixes, max_tokens=300)
    assert sorted(map(len, small.ranks[0])) == [4, 4]
    even = make_plan(lengths, 2, prefixes=prefixes, max_tokens=10_000)
    assert [sum(map(len, rank)) for rank in even.ranks] == [4, 4]


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_nothing_to_pack(lengths: list[int]) -> None:
    with pytest.raises(TrainError, match="at least one token"):
        make_plan(lengths, 1)


def test_short_questions_after_one_system_prompt_do_not_overfill() -> None:
    """Each sample copies its question, which is too short for a node, and the copies must fit into the budget."""
    rng = np.random.default_rng(0)
    system, questions = rng.integers(0, 500, 200), rng.integers(0, 500, (64, LEAST - 6))
    parts = [(system, question, rng.integers(0, 500, 40)) for question in questions for _ in range(8)]
    samples = [np.concatenate(part).astype(np.int32) for part in parts]
    made = make_plan([len(ids) for ids in samples], 2, prefixes=SharedPrefixes.of(samples), max_tokens=2048)
    for microbatch in (mb for rank in made.ranks for mb in rank):
        own = [samples[i] for i in microbatch]
        assert Tree.of([len(ids) for ids in own], SharedPrefixes.of(own)).tokens <= 2048


def test_settings_become_a_plan() -> None:
    def planned(**chosen: Any) -> PackingPlan:
        place = SimpleNamespace(settings=TrainSettings(share_prefixes=False, **chosen), ranks=SimpleNamespace(dp=1))
        network, shape = SimpleNamespace(check=lambda _: None), SimpleNamespace(vocab=10**6, matrices=1, channels=1)
        slot: Any = SimpleNamespace(place=place, network=network, shape=shape, divisor=1)
        samples = []
        for length in (5, 9, 30):
            samples.append(sample := Sample(reward=0.0))
            sample.set_prompt_tokens([1] * length)
            sample.append_model([2], [-1.0])
        return ModelState.plan(slot, TrainBatch.from_samples([samples]))

    made = planned(use_dynamic_batch_size=True, max_tokens_per_gpu=16, context_parallel_size=2)
    assert made.alignment == 4
    assert len(made.ranks[0]) == 2  # 32 tokens over two devices; 8 + 12 go together
    assert planned(micro_batch_size=2, balance_data=False).ranks == (((0, 1), (2,)),)
