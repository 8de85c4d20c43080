"""The schedule against Megatron-LM's own scheduler, step by step, and torch's if the shapes are the same."""

from typing import Any

import pytest
import torch

from agentrl.errors import SettingsError
from agentrl.train.learning_rate import learning_rate, muon_learning_rate
from agentrl.train.settings import TrainSettings

BASE = {"lr": 3e-4, "min_lr": 1e-5, "lr_decay_iters": 40}
STYLES: list[dict[str, Any]] = [
    {"lr_decay_style": "constant"},
    {"lr_decay_style": "linear"},
    {"lr_decay_style": "cosine"},
    {"lr_decay_style": "inverse-square-root"},
    *(
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 12, "lr_wsd_decay_style": shape}
        for shape in ("linear", "cosine", "exponential", "minus_sqrt")
    ),
]


def one_group_optimizer(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


@pytest.mark.parametrize("style", STYLES, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize("warmup", [{}, {"lr_warmup_iters": 7}, {"lr_warmup_iters": 7, "lr_warmup_init": 1e-6}])
def test_same_as_megatron(style: dict[str, Any], warmup: dict[str, Any]) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    settings = TrainSettings(**BASE, **style, **warmup)
    optimizer = one_group_optimizer(settings.lr)
    theirs = OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=40,
        lr_decay_style=settings.lr_decay_style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1,
        wd_incr_style="constant",
        wsd_decay_steps=settings.lr_wsd_decay_iters,
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )
    for step in range(50):
        assert learning_rate(step, settings) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), step
        theirs.step(1)


def test_cosine_is_torchs() -> None:
    settings = TrainSettings(**BASE, lr_decay_style="cosine")
    optimizer = one_group_optimizer(settings.lr)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40, eta_min=settings.min_lr)
    for step in range(41):
        assert learning_rate(step, settings) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        theirs.step()


def test_linear_is_torchs() -> None:
    settings = TrainSettings(lr=1e-3, lr_decay_style="linear", lr_decay_iters=20)
    optimizer = one_group_optimizer(settings.lr)
    theirs = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=20)
    for step in range(21):
        assert learning_rate(step, settings) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9, abs=1e-12)
        optimizer.step()
        theirs.step()


def test_the_decay_ends_with_the_run_by_default() -> None:
    settings = TrainSettings(lr=1.0, lr_decay_style="linear", lr_warmup_fraction=0.2)
    assert learning_rate(0, settings, total_steps=10) == 0.0
    assert learning_rate(2, settings, total_steps=10) == 1.0
    assert learning_rate(6, settings, total_steps=10) == pytest.approx(0.5)
    assert learning_rate(99, settings, total_steps=10) == 0.0


def test_muon_has_its_own_peak() -> None:
    settings = TrainSettings(**BASE, lr_decay_style="cosine", optimizer="muon", muon_lr=0.02)
    assert muon_learning_rate(0, settings) == pytest.approx(0.02)
    assert muon_learning_rate(20, settings) / learning_rate(20, settings) == pytest.approx(0.02 / 3e-4)
    assert muon_learning_rate(3, TrainSettings(lr=0.1, optimizer="muon")) == 0.1
    assert muon_learning_rate(3, TrainSettings(lr=0.0, optimizer="muon", muon_lr=0.02)) == 0.02


def test_a_shape_without_an_end_is_refused() -> None:
    with pytest.raises(SettingsError, match="the run's length"):
        learning_rate(0, TrainSettings(lr_decay_style="cosine"))
    with pytest.raises(SettingsError, match="lr_warmup_fraction"):
        learning_rate(0, TrainSettings(lr_warmup_fraction=0.1))
    late = TrainSettings(lr_decay_style="WSD", lr_wsd_decay_iters=8, lr_warmup_iters=3)
    with pytest.raises(SettingsError, match="lr_wsd_decay_iters 8 and the warm-up of 3 steps must fit in the 10 steps"):
        learning_rate(9, late, total_steps=10)
    assert learning_rate(9, late, total_steps=11) > 0
    with pytest.raises(SettingsError, match="shorter"):
        learning_rate(9, TrainSettings(lr_decay_style="cosine", lr_warmup_iters=5), total_steps=5)
    with pytest.raises(SettingsError, match="the warm-up of 100 steps must be shorter than the 10 steps of the decay"):
        learning_rate(9, TrainSettings(lr_decay_style="cosine", lr_warmup_iters=100), total_steps=10)
