"""`agentrl check --hook`: each hook's example passes. A bad function is named with the expected form."""

from pathlib import Path

import pytest

from agentrl.compat.conformance import check_hook, hooks
from agentrl.config import RunSettings
from agentrl.errors import PluginError, SettingsError
from tests.support.tiny_models import make_tiny_model

HERE = Path(__file__).parent
EXAMPLES = {
    "custom_generate_function_path": "generate",
    "custom_rm_path": "other_reward",
    "dynamic_sampling_filter_path": "dynamic_filter",
    "buffer_filter_path": "newest",
    "data_source_path": "Source",
    "rollout_function_path": "rollout",
    "eval_function_path": "rollout",
    "rollout_sample_hook_path": "each",
    "rollout_sample_filter_path": "sample_filter",
    "rollout_all_samples_process_path": "all_samples",
    "custom_rollout_log_function_path": "log",
    "custom_eval_rollout_log_function_path": "eval_log",
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> RunSettings:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    keys = {"answer_key": "the user's", "filtered": 2, "seen": 0}
    return RunSettings().replace(hf_checkpoint=str(folder), rollout_max_response_len=4, compat_options=keys)


TRAINING = {
    "custom_reward_post_process_path": "normalized",
    "custom_convert_samples_to_train_data_path": "columns",
    "custom_advantage_function_path": "grpo",
    "rollout_data_postprocess_path": "no_early_tokens",
    "custom_loss_function_path": "clipped",
    "custom_tis_function_path": "truncated",
    "custom_pg_loss_reducer_function_path": "sample_means",
}
LOOKED_AT = {
    "custom_megatron_init_path": "begin",
    "custom_model_provider_path": "provider",
    "custom_megatron_before_log_prob_hook_path": "before_log_probs",
    "custom_megatron_before_train_step_hook_path": "before_step",
    "custom_update_weight_post_write_path": "written",
}


def test_there_is_an_example_of_every_hook() -> None:
    assert set(hooks()) == {*EXAMPLES, *TRAINING, *LOOKED_AT}


@pytest.mark.parametrize(("setting", "function"), (TRAINING | LOOKED_AT).items())
def test_hooks_of_training_are_called_or_looked_at(setting: str, function: str) -> None:
    said = check_hook(setting, f"{HERE}/training/hook_examples.py:{function}", RunSettings())
    assert ("returned what it should" in said) is (setting in TRAINING)


@pytest.mark.parametrize("setting", EXAMPLES)
def test_the_example_of_each_hook_is_called_and_passes(setting: str, settings: RunSettings) -> None:
    paths = {"custom_generate_function_path": "generate", "custom_rm_path": "reward"}
    run = settings.replace(**{name: f"{HERE}/functions.py:{function}" for name, function in paths.items()})
    said = check_hook(setting, f"{HERE}/functions.py:{EXAMPLES[setting]}", run)
    assert "returned what it should" in said


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("rollout-sample-filter", "each", r"expected \(args, groups\): missing a required argument: 'rollout_id'"),
        ("custom-rm", "fails_to_reward", "expected a number or a dict .*, got None"),
        ("custom_rm_path", "divides", "raised ZeroDivisionError: .* at .*functions.py"),
        ("dynamic_sampling_filter", "other_reward", "expected DynamicFilterOutput or a bool"),
        ("custom_reward_post", "fails_to_reward", r"expected \(raw_rewards, rewards\).*, got None"),
    ],
)
def test_what_does_not_fit_is_said(name: str, function: str, message: str, settings: RunSettings) -> None:
    with pytest.raises(PluginError, match=message):
        check_hook(name, f"{HERE}/functions.py:{function}", settings)


def test_the_path_may_be_that_of_the_settings(settings: RunSettings) -> None:
    own = settings.replace(custom_rm_path=f"{HERE}/functions.py:other_reward")
    assert "functions.py:other_reward" in check_hook("custom-rm", None, own)
    with pytest.raises(SettingsError, match="give custom_rm=PATH, or set custom_rm_path"):
        check_hook("custom_rm", None, settings)
    with pytest.raises(SettingsError, match="of one of custom_generate_function_path, custom_rm"):
        check_hook("reward", "x.py:f", settings)
