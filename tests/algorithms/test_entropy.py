"""Entropy control: settings, and its effect on losses."""

from typing import Any

import pytest
import torch

from agentrl.algorithms import AlgorithmSettings, algorithm_of, compute_advantages
from agentrl.algorithms.registry import ESTIMATORS
from tests.algorithms.test_returns import inputs
from tests.algorithms.views import view


def settings(**given: Any) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"covariance_ratio": 0.1}, "covariance_ratio 0.1 has no effect without entropy_control"),
        (
            {"entropy_control": "kl", "covariance_low": 0.5},
            "covariance_low 0.5 has no effect without entropy_control clip",
        ),
        ({"entropy_control": "clip", "covariance_kl_coef": 2.0}, "covariance_kl_coef 2.0 has no effect"),
        ({"entropy_control": "clip", "covariance_low": 6.0}, "must be below covariance_high"),
        ({"entropy_coef_step": 0.1}, "entropy_coef_step 0.1 has no effect without entropy_target"),
        ({"entropy_target": 0.2, "entropy_coef": 0.1}, "entropy_coef 0.1 must be from 0 to entropy_coef_max"),
        ({"entropy_control": "clip", "advantage_estimator": "gspo"}, "entropy_control clip has no effect with gspo"),
        ({"entropy_control": "kl", "advantage_estimator": "gmpo"}, "entropy_control kl has no effect with gmpo"),
        ({"entropy_target": 0.2, "loss_type": "sft_loss"}, "entropy_target 0.2 has no effect with sft_loss"),
    ],
)
def test_settings_without_effect_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**given)


@pytest.mark.parametrize("name", [n for n, a in ESTIMATORS.items() if "entropy_control" in a.takes])
def test_every_policy_gradient_loses_the_policy_term_of_chosen_tokens(name: str) -> None:
    weights = {"gdpo_weights": {"a": 1.0}} if name == "gdpo" else {}
    algorithm = algorithm_of(settings(advantage_estimator=name, entropy_control="clip", **weights))
    assert "old_log_probs" in algorithm.reads
    new = torch.tensor([-0.5, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    got = algorithm.token_loss(view(new, advantages=torch.ones_like(new), chosen=chosen))
    (gradient,) = torch.autograd.grad(got.loss.sum(), new)
    assert gradient[1] == 0
    assert gradient[0] != 0
    assert got.stats["entropy_controlled"].tolist() == [0, 1, 0]


def test_the_coefficient_applies_below_the_target_and_is_kept() -> None:
    given = settings(entropy_target=1.0, entropy_coef=0.001, entropy_coef_step=0.001)
    rollout = inputs([[1, 1], [1, 0]], [1.0, 0.0], old_log_probs=torch.tensor([-0.5, -0.7, -0.3, -9.0]))
    metrics = compute_advantages(rollout, given).metrics
    assert metrics["sampled_entropy"] == pytest.approx(0.5)
    now, later = algorithm_of(given).adapted(metrics)
    assert now.state == {"entropy_coef": pytest.approx(0.001)}
    assert later.state == {"entropy_coef": pytest.approx(0.002)}
    now, later = later.adapted({"sampled_entropy": 1.5})
    assert now.state == {"entropy_coef": 0.0}
    assert later.state == {"entropy_coef": pytest.approx(0.001)}
    new = torch.zeros(2, requires_grad=True)
    entropy = torch.ones(2, requires_grad=True)
    loss = later.token_loss(view(new, entropy=entropy)).loss.sum()
    assert torch.autograd.grad(loss, entropy)[0].tolist() == pytest.approx([-0.001, -0.001])
    assert algorithm_of(settings()).adapted({})[0].state == {}
