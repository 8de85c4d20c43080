"""Settings that each algorithm allows, and how an algorithm is found."""

import subprocess
import sys
from typing import TYPE_CHECKING, Any, get_args

import pytest
from pydantic import ValidationError

from agentrl.algorithms import AlgorithmSettings, PolicyGradient, SampleView, algorithm_of
from agentrl.algorithms.registry import ESTIMATORS, LOSS_TYPES
from agentrl.errors import SettingsError

if TYPE_CHECKING:
    from torch import Tensor


def test_defaults_are_slimes() -> None:
    settings = AlgorithmSettings()
    assert (settings.advantage_estimator, settings.loss_type) == ("grpo", "policy_loss")
    assert (settings.eps_clip, settings.eps_clip_high, settings.eps_clip_c) == (0.2, None, None)
    assert settings.rewards_normalization
    assert settings.grpo_std_normalization
    assert "ref_log_probs" not in settings.reads


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"advantage_estimator": "grop"}, "unknown advantage_estimator 'grop', expected one of"),
        (
            {"loss_type": "sft_loss", "advantage_estimator": "ppo"},
            "advantage_estimator ppo has no effect with sft_loss",
        ),
        ({"loss_type": "sft_loss", "kl_coef": 0.1}, "kl_coef 0.1 has no effect with sft_loss"),
        ({"kl_loss_coef": 0.1}, "set use_kl_loss"),
        ({"gamma": 0.99}, "gamma 0.99 has no effect"),
        ({"lambd": 0.95}, "lambd 0.95 has no effect"),
        ({"loss_type": "sft_loss", "use_kl_loss": True}, "use_kl_loss True has no effect with sft_loss"),
        ({"loss_type": "sft_loss", "entropy_coef": 0.1}, "entropy_coef 0.1 has no effect with sft_loss"),
        ({"eps_clip": 1.5}, "less than 1"),
        ({"eps_clip_c": 0.5}, "greater than 1"),
        ({"kl_loss_type": "k4"}, "k1"),
        ({"kl_loss_type": "k3"}, "kl_loss_type k3 has no effect without use_kl_loss or kl_coef"),
        (
            {"rewards_normalization": False, "grpo_std_normalization": False},
            "grpo_std_normalization False has no effect",
        ),
        ({"tis_clip": 3.0}, "tis_clip 3.0 has no effect without use_tis"),
        ({"custom_tis_function_path": "a.b:c"}, "custom_tis_function_path a.b:c has no effect without use_tis"),
        ({"rs_veto_threshold": 1e-4}, "has no effect without use_rs"),
        ({"opsm_delta": 0.1}, "has no effect without use_opsm"),
        ({"use_tis": True, "use_rollout_logprobs": True}, "leaves nothing that use_tis or use_rs could correct"),
        ({"use_rs": True, "use_rollout_logprobs": True}, "leaves nothing that use_tis or use_rs could correct"),
        ({"use_tis": True, "tis_clip": 0.5, "tis_clip_low": 0.5}, "tis_clip_low 0.5 must be below tis_clip 0.5"),
        ({"use_rs": True, "rs_upper_bound": 0.9}, "must be below rs_upper_bound 0.9"),
        ({"loss_type": "sft_loss", "use_tis": True}, "use_tis True has no effect with sft_loss"),
        ({"loss_type": "sft_loss", "use_opsm": True}, "use_opsm True has no effect with sft_loss"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AlgorithmSettings(**changes)


def no_advantage(inputs: SampleView, settings: AlgorithmSettings) -> "Tensor":
    return 0 * inputs.loss_mask


def test_reference_is_needed_for_kl() -> None:
    assert "ref_log_probs" in AlgorithmSettings(use_kl_loss=True).reads
    own = f"{__file__}:no_advantage"
    assert "ref_log_probs" in AlgorithmSettings(advantage_estimator=own, kl_coef=0.1).reads


def test_an_estimator_of_ones_own_may_discount() -> None:
    assert AlgorithmSettings(advantage_estimator="my.mod:fn", gamma=0.99, lambd=0.95).gamma == 0.99


class Own(PolicyGradient):
    name = "own"
    takes = PolicyGradient.takes | {"gamma"}

    def advantages(self, inputs: SampleView) -> "Tensor":
        return self.settings.gamma * inputs.loss_mask


def test_an_algorithm_of_ones_own_says_which_settings_it_takes() -> None:
    path = f"{__file__}:Own"
    assert algorithm_of(AlgorithmSettings(advantage_estimator=path, gamma=0.5)).name == "own"
    with pytest.raises(SettingsError, match="Own: lambd 0.5 has no effect with own; leave it out"):
        algorithm_of(AlgorithmSettings(advantage_estimator=path, lambd=0.5))


def test_supervised_training_takes_no_setting_of_reinforcement_learning() -> None:
    assert AlgorithmSettings(loss_type="sft_loss", calculate_per_token_loss=True).supervised
    assert not AlgorithmSettings().supervised
    with pytest.raises(ValidationError, match=r"normalize_advantages True .* sft_loss; .*eps_clip 0.3 has no effect"):
        AlgorithmSettings(loss_type="sft_loss", eps_clip=0.3, normalize_advantages=True)


def test_the_built_in_algorithms_are_spelled_as_they_are_registered() -> None:
    fields = AlgorithmSettings.model_fields
    assert {"policy_loss", "custom_loss", *LOSS_TYPES} == set(get_args(fields["loss_type"].annotation))
    for name, algorithm in {**ESTIMATORS, **LOSS_TYPES}.items():
        assert algorithm.name == name
        assert algorithm.takes <= fields.keys()


def test_every_field_has_a_help_text() -> None:
    assert all(field.description for field in AlgorithmSettings.model_fields.values())


def test_importing_settings_does_not_import_torch() -> None:
    code = (
        "import sys, agentrl.algorithms.settings, agentrl.train.settings, agentrl.train.batch, agentrl.train.packing;"
        "sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 0
