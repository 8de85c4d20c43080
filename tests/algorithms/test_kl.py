"""The estimators against the exact KL (by enumeration), and their gradients by finite differences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.ops.kl import approximate_kl

KINDS = ("k1", "k2", "k3", "low_var_kl")


def distributions(size: int = 7, spread: float = 0.6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(size, generator=generator, dtype=torch.float64)
    moved = base + spread * torch.randn(size, generator=generator, dtype=torch.float64)
    return base.log_softmax(0), moved.log_softmax(0)


def exact_kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True))


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl"])
def test_expectation_under_the_policy_is_the_kl(kind: str) -> None:
    policy, reference = distributions()
    expected = (policy.exp() * approximate_kl(policy, reference, kind)).sum().item()
    assert expected == pytest.approx(exact_kl(policy, reference), rel=1e-12)


def test_k2_is_close_for_near_policies() -> None:
    policy, reference = distributions(spread=0.05)
    expected = (policy.exp() * approximate_kl(policy, reference, "k2")).sum().item()
    assert expected == pytest.approx(exact_kl(policy, reference), rel=0.05)


def test_monte_carlo_k3_has_less_variance_than_k1() -> None:
    policy, reference = distributions()
    draws = torch.multinomial(policy.exp(), 50_000, replacement=True, generator=torch.Generator().manual_seed(0))
    k1, k3 = (approximate_kl(policy[draws], reference[draws], kind) for kind in ("k1", "k3"))
    want = exact_kl(policy, reference)
    assert k1.mean().item() == pytest.approx(want, abs=4 * k1.std().item() / math.sqrt(len(draws)))
    assert k3.mean().item() == pytest.approx(want, abs=4 * k3.std().item() / math.sqrt(len(draws)))
    assert k3.var() < 0.25 * k1.var()


def test_expected_gradient_of_k2_is_the_gradient_of_the_kl() -> None:
    logits = torch.randn(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    reference = distributions(6)[1]
    policy = logits.log_softmax(0)
    (want,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    estimate = (policy.detach().exp() * approximate_kl(policy, reference, "k2")).sum()
    (got,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(got, want)


@given(st.floats(-9, 0), st.floats(-9, 0))
def test_k2_and_k3_are_never_negative_and_zero_when_equal(a: float, b: float) -> None:
    p, q = torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64)
    for kind in ("k2", "k3", "low_var_kl"):
        assert approximate_kl(p, q, kind).item() >= 0
    for kind in KINDS:
        assert approximate_kl(p, p, kind).item() == 0


def test_low_var_kl_is_bounded_with_a_finite_gradient() -> None:
    p = torch.tensor([-200.0, 0.0, -1.0], requires_grad=True)
    q = torch.tensor([0.0, -200.0, -1.5])
    kl = approximate_kl(p, q, "low_var_kl")
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([10.0, 10.0, math.exp(-0.5) - 0.5], abs=1e-6)
    assert p.grad is not None
    assert p.grad.tolist() == pytest.approx([0.0, 0.0, 1 - math.exp(-0.5)], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str) -> None:
    p = torch.tensor([-0.1, -2.0, -0.7], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([-0.4, -1.0, -0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: approximate_kl(a, b, kind), (p, q))
