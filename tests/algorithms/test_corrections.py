"""Corrections for tokens that another policy sampled, on two samples worked out by hand."""

from typing import Any

import pytest
import torch

from agentrl.algorithms import AlgorithmSettings, TokenView, algorithm_of
from agentrl.algorithms.ops.corrections import correct
from agentrl.errors import PluginError, SettingsError, TrainError
from tests.algorithms.views import view

RATIOS = (4.0, 0.5, 1.0, 0.125, 2.0)
"""Trainer's probability before the step over the engine's: a sample of three tokens and one of two."""


def seen(ratios: tuple[float, ...] = RATIOS, **changes: Any) -> TokenView:
    """Make a view: the sample of three tokens has advantage 2, the other -1. The policy has not changed yet."""
    old = torch.full((len(ratios),), -1.0)
    fields: dict[str, Any] = {
        "sample_ids": torch.tensor([0, 0, 0, 1, 1]),
        "num_samples": 2,
        "old_log_probs": old,
        "rollout_log_probs": old - torch.tensor(ratios).log(),
        "advantages": torch.tensor([2.0, 2.0, 2.0, -1.0, -1.0]),
        "entropy": torch.ones(len(ratios)),
    }
    return view(old.clone().requires_grad_(), **(fields | changes))


def gradient(given: TokenView, **settings: Any) -> tuple[list[float], dict[str, list[float]]]:
    """Return the gradient of the summed loss by each token's log-prob, and the statistics."""
    log_probs, old = given.log_probs.detach().requires_grad_(), given.old_log_probs.detach().requires_grad_()
    fields = {name: getattr(given, name) for name in TokenView.__dataclass_fields__}
    fields |= {"log_probs": log_probs, "old_log_probs": old}
    found = algorithm_of(AlgorithmSettings(**settings)).token_loss(TokenView(**fields))
    found.loss.sum().backward()
    assert log_probs.grad is not None
    assert old.grad is None
    assert not any(stat.requires_grad for stat in found.stats.values())
    return log_probs.grad.tolist(), {name: stat.tolist() for name, stat in found.stats.items()}


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, [2.0, 0.5, 1.0, 0.125, 2.0]),
        ({"tis_clip": 3.0, "tis_clip_low": 0.6}, [3.0, 0.6, 1.0, 0.6, 2.0]),
        ({"tis_mode": "mask"}, [0.0, 0.5, 1.0, 0.125, 2.0]),
        ({"tis_mode": "mask", "tis_clip": 5.0, "tis_clip_low": 0.5}, [4.0, 0.5, 1.0, 0.0, 2.0]),
        ({"tis_level": "sequence"}, [2.0, 2.0, 2.0, 0.25, 0.25]),
        ({"tis_level": "sequence", "tis_mode": "mask", "tis_clip": 1.9}, [0.0, 0.0, 0.0, 0.25, 0.25]),
        ({"tis_level": "geometric"}, [2 ** (1 / 3)] * 3 + [0.5, 0.5]),
    ],
)
def test_importance_weights_multiply_the_policy_term(settings: dict[str, Any], weights: list[float]) -> None:
    grads, stats = gradient(seen(), use_tis=True, **settings)
    assert grads == pytest.approx([-2 * w for w in weights[:3]] + weights[3:], rel=1e-6)
    assert stats["tis_clipfrac"] == [float(abs(w - r) > 1e-6) for w, r in zip(weights, stats["tis"], strict=True)]
    assert stats["tis_abs"] == pytest.approx([abs(r - 1) for r in stats["tis"]])


def test_without_a_correction_nothing_changes() -> None:
    grads, stats = gradient(seen())
    assert grads == [-2, -2, -2, 1, 1]
    assert not [name for name in stats if name.startswith(("tis", "rs_", "opsm"))]


def test_a_masked_token_counts_in_no_samples_ratio() -> None:
    masked = seen(loss_mask=torch.tensor([0, 1, 1, 1, 1]))
    found = correct(masked, AlgorithmSettings(use_tis=True, tis_level="sequence"))
    assert found.weights.tolist() == pytest.approx([0.5, 0.5, 0.5, 0.25, 0.25])


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 1, 0, 1]),
        ({"rs_upper_bound": 4.5, "rs_lower_bound": 0.6}, [1, 0, 1, 0, 1]),
        ({"rs_level": "sequence"}, [1, 1, 1, 0, 0]),
        ({"rs_level": "geometric", "rs_upper_bound": 1.5, "rs_lower_bound": 0.4}, [1, 1, 1, 1, 1]),
        ({"rs_upper_bound": 9.0, "rs_veto_threshold": 0.2}, [1, 1, 1, 0, 0]),
        ({"rs_upper_bound": 3.0, "rs_veto_threshold": 0.2}, [0, 1, 1, 0, 0]),
    ],
)
def test_what_is_rejected_is_seen_by_no_term_of_the_loss(settings: dict[str, Any], kept: list[int]) -> None:
    terms = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k2"}
    given = seen(ref_log_probs=torch.full((5,), -3.0))
    grads, stats = gradient(given, use_rs=True, **settings, **terms)
    assert grads == pytest.approx([k * (-a + 0.5 * 2.0) for k, a in zip(kept, [2.0] * 3 + [-1.0] * 2, strict=True)])
    assert stats["rs_masked"] == [1 - k for k in kept]
    if "rs_veto_threshold" in settings:
        assert stats["rs_catastrophic_token_fraction"] == [0, 0, 0, 1, 0]
        assert stats["rs_catastrophic_seq_fraction"] == [0, 0, 0, 1, 1]
    else:
        assert sum(stats["rs_mask_fraction_low"]) + sum(stats["rs_mask_fraction_high"]) == 5 - sum(kept)


def test_weights_and_rejection_together() -> None:
    grads, _ = gradient(seen(), use_tis=True, use_rs=True, rs_level="sequence")
    assert grads == pytest.approx([-4.0, -1.0, -2.0, 0, 0])


def test_a_sample_with_negative_advantage_that_the_policy_left_has_no_policy_term() -> None:
    """The engine's log-probs minus the policy's have the means -log(2) / 3 and log(4) / 2."""
    for delta, kept in ((0.69, 0), (0.70, 1)):
        grads, stats = gradient(seen(), use_opsm=True, opsm_delta=delta)
        assert grads == [-2, -2, -2, kept, kept]
        assert stats["opsm_clipfrac"] == [0, 0, 0, 1 - kept, 1 - kept]
    grads, _ = gradient(seen(advantages=torch.ones(5)), use_opsm=True)
    assert grads == [-1.0] * 5


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("sign", [1, -1])
def test_log_ratios_of_100_leave_everything_finite(level: str, mode: str, sign: int) -> None:
    rollout = torch.tensor([-100.5, -0.5, -0.5, -0.5, -0.5])
    old = rollout.flip(0)
    apart = seen(old_log_probs=old if sign > 0 else rollout, rollout_log_probs=rollout if sign > 0 else old)
    grads, stats = gradient(apart, use_tis=True, use_rs=True, use_opsm=True, tis_level=level, tis_mode=mode)
    assert all(torch.tensor(values).isfinite().all() for values in [grads, *stats.values()])


def half(given: TokenView, settings: AlgorithmSettings) -> torch.Tensor:
    return given.log_probs.exp() * 0 + 0.5 * settings.tis_clip


def too_few(given: TokenView, settings: AlgorithmSettings) -> torch.Tensor:
    return given.log_probs[1:]


def not_finite(given: TokenView, settings: AlgorithmSettings) -> torch.Tensor:
    return given.log_probs / 0


def no_tensor(given: TokenView, settings: AlgorithmSettings) -> Any:
    return [1.0] * 5


def test_a_function_of_ones_own_gives_the_weights() -> None:
    path = f"{__file__}:half"
    grads, stats = gradient(seen(), use_tis=True, custom_tis_function_path=path, tis_clip=3.0)
    assert grads == [-3, -3, -3, 1.5, 1.5]
    assert stats["tis"] == [1.5] * 5


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("too_few", r"custom-tis-function-path .*each of the 5 response tokens, got shape \(4,\)"),
        ("not_finite", "the weights of 5 trained token"),
        ("no_tensor", "expected a tensor, got list"),
    ],
)
def test_a_function_of_ones_own_that_gives_no_weights(name: str, words: str) -> None:
    with pytest.raises(PluginError, match=words):
        gradient(seen(), use_tis=True, custom_tis_function_path=f"{__file__}:{name}")


@pytest.mark.parametrize(("name", "words"), [("absent", "no 'absent'"), ("RATIOS", "expected a function, got ")])
def test_a_path_to_no_function_is_known_before_anything_starts(name: str, words: str) -> None:
    settings = AlgorithmSettings(use_tis=True, custom_tis_function_path=f"{__file__}:{name}")
    with pytest.raises((PluginError, SettingsError), match=words):
        algorithm_of(settings)


@pytest.mark.parametrize("switch", ["use_tis", "use_rs", "use_opsm"])
def test_without_the_engines_log_probs_nothing_is_corrected(switch: str) -> None:
    settings: dict[str, Any] = {switch: True}
    with pytest.raises(TrainError, match="needs rollout_log_probs"):
        gradient(seen(rollout_log_probs=None), **settings)
