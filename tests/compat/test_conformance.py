"""`agentrl check --hook`: each hook's example passes, and one that does not fit is named with what was expected."""

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


def test_there_is_an_example_of_every_hook_around_rollouts() -> None:
    assert {name for name, hook in hooks().items() if hook.side == "rollout"} == set(EXAMPLES)


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
    with pytest.raises(SettingsError, match="no such hook; slime's are custom_generate"):
        check_hook("custom_reward", "x.py:f", settings)
