"""On-policy distillation: by hand, on top of an estimator, and refused settings."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from agentrl.algorithms import AlgorithmSettings, SampleView, algorithm_of, compute_advantages
from agentrl.errors import TrainError
from tests.algorithms.views import view

OPD = "on_policy_distillation"


def inputs(**changes: Any) -> SampleView:
    """Make two samples of one prompt. The second has an observation token, at which no log-prob is valid."""
    found = SampleView(
        rewards=torch.tensor([1.0, 0.0], dtype=torch.float64),
        group_ids=torch.tensor([0, 0]),
        trajectory_ids=torch.tensor([0, 1]),
        lengths=torch.tensor([2, 3]),
        loss_mask=torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]),
        old_log_probs=torch.tensor([-1.0, -2.0, -0.5, 0.0, -3.0]),
        teacher_log_probs=torch.tensor([-1.5, -1.0, -0.5, math.nan, -3.25]),
    )
    return dataclasses.replace(found, **changes)


def test_alone_the_advantage_is_what_the_teacher_thinks_better() -> None:
    found = compute_advantages(inputs(), AlgorithmSettings(advantage_estimator=OPD, opd_kl_coef=2.0))
    assert found.advantages.tolist() == [-1.0, 2.0, 0.0, 0.0, -0.5]
    assert found.metrics["opd_reverse_kl"] == (0.5 - 1.0 + 0.0 + 0.25) / 4
    assert found.returns is None


def test_neither_rewards_nor_groups_matter_to_it() -> None:
    settings = AlgorithmSettings(advantage_estimator=OPD)
    other = inputs(rewards=torch.tensor([math.nan, 7.0]), group_ids=torch.tensor([0, 1]))
    assert torch.equal(
        compute_advantages(inputs(), settings).advantages, compute_advantages(other, settings).advantages
    )
    algorithm = algorithm_of(settings)
    assert not algorithm.compares_within_group
    assert not algorithm.needs_rewards


def test_it_is_added_to_any_estimator_before_whitening() -> None:
    plain = compute_advantages(inputs(), AlgorithmSettings())
    added = compute_advantages(inputs(), AlgorithmSettings(use_opd=True, opd_kl_coef=0.5))
    expected = plain.advantages - 0.5 * torch.tensor([0.5, -1.0, 0.0, 0.0, 0.25])
    torch.testing.assert_close(added.advantages, expected)
    assert added.metrics["opd_reverse_kl"] == -0.0625
    assert "opd_reverse_kl" not in plain.metrics
    white = compute_advantages(inputs(), AlgorithmSettings(use_opd=True, opd_kl_coef=0.5, normalize_advantages=True))
    trained = white.advantages[inputs().loss_mask > 0]
    assert abs(trained.mean().item()) < 1e-6
    assert abs(trained.std(correction=0).item() - 1) < 1e-6


def test_with_coefficient_0_the_teacher_is_only_measured() -> None:
    plain = compute_advantages(inputs(), AlgorithmSettings())
    measured = compute_advantages(inputs(), AlgorithmSettings(use_opd=True, opd_kl_coef=0.0))
    assert torch.equal(plain.advantages, measured.advantages)
    assert measured.metrics["opd_reverse_kl"] == -0.0625


def test_the_gradient_by_hand() -> None:
    # The next token is one of two: p = softmax(z), the first was sampled. d(-A log p)/dz = -A (onehot - p), on-policy.
    z = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)
    log_probs, teacher = torch.log_softmax(z, -1), torch.log_softmax(torch.tensor([-1.0, 1.0], dtype=torch.float64), -1)
    settings = AlgorithmSettings(advantage_estimator=OPD, opd_kl_coef=0.7)
    one = SampleView(
        rewards=torch.zeros(1),
        group_ids=torch.zeros(1, dtype=torch.long),
        trajectory_ids=torch.zeros(1, dtype=torch.long),
        lengths=torch.ones(1, dtype=torch.long),
        loss_mask=torch.ones(1),
        old_log_probs=log_probs[:1].detach(),
        teacher_log_probs=teacher[:1],
    )
    advantages = compute_advantages(one, settings).advantages
    seen = view(log_probs=log_probs[:1], old_log_probs=log_probs[:1].detach(), advantages=advantages.double())
    algorithm_of(settings).token_loss(seen).loss.sum().backward()
    p = [math.exp(x) / (math.exp(0.3) + math.exp(-0.4)) for x in (0.3, -0.4)]
    q = math.exp(-1.0) / (math.exp(-1.0) + math.exp(1.0))
    advantage = -0.7 * (math.log(p[0]) - math.log(q))
    assert z.grad is not None
    assert z.grad.tolist() == pytest.approx([-advantage * (1 - p[0]), advantage * p[1]], abs=1e-7)


def test_models_compute_what_it_reads() -> None:
    both = {"old_log_probs", "teacher_log_probs"}
    assert algorithm_of(AlgorithmSettings(advantage_estimator=OPD)).reads == both
    assert algorithm_of(AlgorithmSettings(use_opd=True)).reads == both
    assert "teacher_log_probs" in AlgorithmSettings(use_opd=True).reads
    assert not AlgorithmSettings().reads
    with pytest.raises(TrainError, match="needs teacher_log_probs"):
        compute_advantages(inputs(teacher_log_probs=None), AlgorithmSettings(use_opd=True))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"opd_kl_coef": 0.5}, "opd_kl_coef 0.5 has no effect without use_opd; set use_opd"),
        ({"opd_type": "sglang"}, "opd_type sglang has no effect without use_opd"),
        ({"use_opd": True, "loss_type": "sft_loss"}, "use_opd True has no effect with sft_loss"),
        ({"kl_coef": 0.1, "advantage_estimator": OPD}, "kl_coef 0.1 has no effect with on_policy_distillation"),
    ],
)
def test_settings_without_effect_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        AlgorithmSettings(**given)
