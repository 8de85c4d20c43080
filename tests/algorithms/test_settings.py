import subprocess
import sys

import pytest
from pydantic import ValidationError

from agentrl.algorithms.settings import AlgorithmSettings


def test_defaults_are_slimes() -> None:
    settings = AlgorithmSettings()
    assert (settings.advantage_estimator, settings.loss_type) == ("grpo", "policy_loss")
    assert (settings.eps_clip, settings.eps_clip_high, settings.eps_clip_c) == (0.2, None, None)
    assert settings.rewards_normalization
    assert settings.grpo_std_normalization
    assert not settings.needs_reference


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"advantage_estimator": "grop"}, "did you mean 'grpo'"),
        ({"kl_coef": 0.1}, "use_kl_loss"),
        ({"kl_loss_coef": 0.1}, "set use_kl_loss"),
        ({"gamma": 0.99}, "gamma 0.99 has no effect"),
        ({"lambd": 0.95}, "lambd 0.95 has no effect"),
        ({"loss_type": "sft_loss", "use_kl_loss": True}, "use_kl_loss would have no effect"),
        ({"loss_type": "sft_loss", "entropy_coef": 0.1}, "entropy_coef would have no effect"),
        ({"eps_clip": 1.5}, "less than 1"),
        ({"eps_clip_c": 0.5}, "greater than 1"),
        ({"kl_loss_type": "k4"}, "k1"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_mistakes_are_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AlgorithmSettings(**changes)


def test_reference_is_needed_for_kl() -> None:
    assert AlgorithmSettings(use_kl_loss=True).needs_reference
    assert AlgorithmSettings(advantage_estimator="my.mod:fn", kl_coef=0.1).needs_reference


def test_an_estimator_of_ones_own_may_discount() -> None:
    assert AlgorithmSettings(advantage_estimator="my.mod:fn", gamma=0.99, lambd=0.95).gamma == 0.99


def test_every_field_has_a_help_text() -> None:
    assert all(field.description for field in AlgorithmSettings.model_fields.values())


def test_importing_settings_does_not_import_torch() -> None:
    code = (
        "import sys, agentrl.algorithms.settings, agentrl.train.settings, agentrl.train.batch, agentrl.train.packing;"
        "sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
