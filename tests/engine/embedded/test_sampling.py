"""Properties of sampling: the sampling support, inversion of the distribution, penalties."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.embedded.sampling import adjust, choose
from agentrl.engine.request_sampling import RequestSampling
from tests.support.nightly import examples

LOGITS = st.lists(st.floats(-8, 8), min_size=2, max_size=40)
FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.2, 3),
        "top_k": st.one_of(st.just(-1), st.integers(2, 50)),
        "top_p": st.floats(0.01, 1),
        "min_p": st.floats(0, 0.5),
    }
)


def params(**raw: Any) -> RequestSampling:
    return RequestSampling.decode(raw, vocab_size=100_000)


def allowed(logits: list[float], p: RequestSampling) -> set[int]:
    """Return the sampling support by its definition, in plain Python."""
    weights = torch.tensor([logits]).div(p.temperature).log_softmax(-1).exp()[0].tolist()
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept, before = set(), 0.0
    for rank, i in enumerate(order):
        tolerance = 1e-6
        rank_fits = p.top_k < 0 or rank < p.top_k
        if rank_fits and before <= p.top_p + tolerance and weights[i] >= weights[order[0]] * p.min_p - tolerance:
            kept.add(i)
        before += weights[i]
    last = weights[order[p.top_k - 1]] if 0 < p.top_k <= len(order) else 0
    return kept | {i for i in order if abs(weights[i] - last) < 1e-7}


def support(probs: torch.Tensor, rows: list[RequestSampling]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sorted probabilities, with zeros for all that the filters drop, and their ids, by a full sort."""
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.double().cumsum(-1) - ordered.double()
    for i, p in enumerate(rows):
        drop = (before[i] > p.top_p) & (p.top_p < 1) | (ordered[i] < ordered[i, 0] * torch.tensor(p.min_p))
        drop |= torch.arange(len(drop)) >= (p.top_k if p.top_k > 0 else len(drop))
        ordered[i, drop] = 0
    return ordered, ids


@given(LOGITS, FILTERS, st.floats(0, 1, exclude_max=True))
@settings(max_examples=examples(1.5), deadline=None)
def test_the_token_is_in_the_support(logits: list[float], filters: dict[str, Any], uniform: float) -> None:
    p = params(**filters)
    choice = choose(torch.tensor([logits]), [p], [uniform])
    assert choice.tokens[0] in allowed(logits, p)


@given(LOGITS, FILTERS)
@settings(max_examples=examples(1), deadline=None)
def test_reported_log_probs_are_of_the_unfiltered_scaled_distribution(
    logits: list[float], filters: dict[str, Any]
) -> None:
    p = params(**filters)
    choice = choose(torch.tensor([logits]), [p], [0.5])
    expected = torch.tensor([logits]).div(p.temperature).log_softmax(-1)
    torch.testing.assert_close(choice.log_probs, expected)
    assert math.isclose(choice.log_probs.exp().sum().item(), 1, abs_tol=1e-5)


@given(LOGITS)
@settings(max_examples=60, deadline=None)
def test_evenly_spread_uniforms_reproduce_the_distribution(logits: list[float]) -> None:
    """With n evenly spread uniforms, inversion gives each token its share, to within one."""
    count = 400
    probs = torch.tensor(logits).softmax(-1)
    rows = torch.tensor([logits]).expand(count, -1)
    tokens = choose(rows, [params()] * count, [(i + 0.5) / count for i in range(count)]).tokens
    assert tokens == sorted(tokens)
    for token in range(len(logits)):
        assert abs(tokens.count(token) - count * probs[token].item()) <= 1.01


@given(LOGITS, FILTERS, st.floats(0, 1, exclude_max=True))
@settings(max_examples=60, deadline=None)
def test_a_row_does_not_depend_on_its_neighbours(logits: list[float], filters: dict[str, Any], uniform: float) -> None:
    others = [params(), params(temperature=0), params(top_k=2), params(**filters)]
    row = torch.tensor([logits])
    together = choose(row.expand(4, -1), others, [0.3, 0.3, 0.9, uniform]).tokens[3]
    assert choose(row, others[3:], [uniform]).tokens[0] == together


@given(LOGITS)
@settings(max_examples=40, deadline=None)
def test_zero_temperature_is_greedy(logits: list[float]) -> None:
    choice = choose(torch.tensor([logits]), [params(temperature=0)], [0.999])
    row = torch.tensor(logits)
    assert row[choice.tokens[0]] == row.max()
    torch.testing.assert_close(choice.log_probs, torch.tensor([logits]).log_softmax(-1))


@pytest.mark.parametrize("spread", [0.5, 4.0])
@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.3}, {"top_p": 0.9999}, {"top_k": 700}])
def test_a_large_vocabulary_is_sampled_as_a_full_sort_says(filters: dict[str, Any], spread: float) -> None:
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0)) * spread
    rows = [params(**filters)] * 8
    uniforms = [i / 8 for i in range(8)]
    tokens = choose(logits, rows, uniforms).tokens
    kept, ids = support(logits.softmax(-1), rows)
    for i, token in enumerate(tokens):
        cumulative = kept[i].double().cumsum(-1)
        place = int((ids[i] == token).nonzero())
        before = cumulative[place - 1].item() if place else 0.0
        total = cumulative[-1].item()
        assert before - 1e-6 <= uniforms[i] * total <= cumulative[place].item() + 1e-6


@given(LOGITS, FILTERS, st.floats(0, 1, exclude_max=True))
@settings(max_examples=examples(1), deadline=None)
def test_what_was_kept_is_what_the_definition_keeps(
    logits: list[float], filters: dict[str, Any], uniform: float
) -> None:
    p = params(**filters)
    choice = choose(torch.tensor([logits] * 2), [params(), p], [0.5, uniform], keep=[1] if p.filtered else [])
    assert choice.kept.keys() == ({1} if p.filtered else set())
    for ids, log_prob in choice.kept.values():
        check_kept(choice.log_probs[1], ids.tolist(), choice.tokens[1], log_prob)
        assert set(ids.tolist()) <= allowed(logits, p)


def check_kept(row: torch.Tensor, ids: list[int], token: int, log_prob: float) -> None:
    """Check that the kept tokens are the likeliest and include the chosen one. Its log-prob is a softmax over them."""
    assert len(set(ids)) == len(ids)
    assert row[ids].tolist() == row.topk(len(ids)).values.tolist()
    assert math.isclose(log_prob, row[ids].double().log_softmax(-1)[ids.index(token)].item(), abs_tol=1e-5)


@pytest.mark.parametrize("spread", [0.5, 4.0])
@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.3}, {"top_p": 0.9999}, {"top_k": 700}])
def test_of_a_large_vocabulary_the_whole_set_is_kept(filters: dict[str, Any], spread: float) -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)) * spread
    rows = [params(**filters)] * 3 + [params(temperature=0)]
    choice = choose(logits, rows, [0.1, 0.5, 0.9, 0.5], keep=range(4))
    left, ids = support(choice.log_probs.exp(), rows)
    for i, (kept, log_prob) in choice.kept.items():
        check_kept(choice.log_probs[i], kept.tolist(), choice.tokens[i], log_prob)
        assert kept.tolist() == ([choice.tokens[i]] if i == 3 else ids[i][left[i] > 0].tolist())
    assert len(choice.kept) == 4


def test_extreme_uniforms_never_leave_the_support() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]])
    for uniform, token in ((0.0, 0), (math.nextafter(1, 0), 2)):
        assert choose(logits, [params()], [uniform]).tokens == [token]
        assert choose(logits, [params(top_k=3)], [uniform]).tokens[0] in (0, 2)


def test_a_top_k_that_no_tensor_can_hold_keeps_all() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    for uniform in (0.1, 0.5, 0.9):
        kept = choose(logits, [params(top_k=2**64 - 1)], [uniform]).tokens
        assert kept == choose(logits, [params(top_k=50)], [uniform]).tokens


def test_null_is_a_default_but_for_the_length() -> None:
    assert params(temperature=None, stop=None) == params()
    assert params(max_new_tokens=None).max_new_tokens is None


def test_penalties_follow_their_formulas() -> None:
    row = torch.tensor([1.0, -1.0, 2.0, 0.5])
    adjust(row, params(repetition_penalty=2.0, presence_penalty=0.5), output=[0, 1])
    assert row.tolist() == [0.25, -3.0, 2.0, 0.5]
    extreme = torch.tensor([1.0, -1.0, 2.0])
    adjust(extreme, params(repetition_penalty=1e-39, logit_bias={1: 1e39, 2: -1e39}), output=[0])
    assert extreme.log_softmax(-1).isfinite().all()
    row = torch.tensor([1.0, 1.0, 1.0])
    adjust(row, params(frequency_penalty=0.5, presence_penalty=0.25), output=[0, 0, 1])
    assert row.tolist() == [1 - 1.25, 1 - 0.75, 1.0]
