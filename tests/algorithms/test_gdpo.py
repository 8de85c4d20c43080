"""Several rewards at once: the advantages and the loss of a run with a policy of two tokens."""

import pytest
import torch
from torch import Tensor

from agentrl.algorithms import AlgorithmSettings, SampleView, algorithm_of, compute_advantages
from tests.algorithms.views import view

PROMPTS, SAMPLES, ARMS, STEPS = 4, 8, 4, 100


def learned(settings: AlgorithmSettings, seed: int) -> tuple[float, float]:
    """Return the probabilities of both right arms after training; they begin at 1/4. A trajectory has two tokens, each
    an arm. The first earns 1 if it is right, the second 100, with noise of standard deviation 100."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.zeros(2, ARMS, dtype=torch.float64, requires_grad=True)
    count = PROMPTS * SAMPLES
    for _ in range(STEPS):
        arms = torch.multinomial(logits.detach().softmax(-1), count, replacement=True, generator=draw).T
        noise = torch.randn(count, dtype=torch.float64, generator=draw)
        right = (arms == 0).double()
        parts = torch.stack([right[:, 0], 100 * (right[:, 1] + noise)], 1)
        inputs = SampleView(
            group_ids=torch.arange(PROMPTS).repeat_interleave(SAMPLES),
            trajectory_ids=torch.arange(count),
            lengths=torch.full((count,), 2),
            loss_mask=torch.ones(2 * count),
            rewards=parts.sum(1),
            reward_parts=parts,
        )
        advantages = compute_advantages(inputs, settings).advantages.double()
        loss = step_loss(settings, chosen_log_probs(logits, arms), advantages)
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits - gradient).detach().requires_grad_()
    first, second = logits.softmax(-1)[:, 0].tolist()
    return first, second


def chosen_log_probs(logits: Tensor, arms: Tensor) -> Tensor:
    return logits.log_softmax(-1)[torch.arange(2), arms].flatten()


def step_loss(settings: AlgorithmSettings, log_probs: Tensor, advantages: Tensor) -> Tensor:
    return algorithm_of(settings).token_loss(view(log_probs, advantages=advantages)).loss.mean()


@pytest.mark.parametrize("seed", [0, 1])
def test_rewards_of_scales_1_and_100_both_rise(seed: int) -> None:
    first, second = learned(AlgorithmSettings(advantage_estimator="gdpo", gdpo_weights={"a": 1.0, "b": 1.0}), seed)
    assert first > 0.9
    assert second > 0.9
    first, second = learned(AlgorithmSettings(), seed)
    assert first < 0.6, "the sum of the rewards hides the small one from grpo"
    assert second > 0.9


def test_weights_are_needed() -> None:
    with pytest.raises(ValueError, match="name them with gdpo_weights"):
        AlgorithmSettings(advantage_estimator="gdpo")
    with pytest.raises(ValueError, match="gdpo_weights .* has no effect with grpo"):
        AlgorithmSettings(gdpo_weights={"a": 1.0})
