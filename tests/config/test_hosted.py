"""Settings of a hosted model: required ones, unsupported ones, and commands that refuse such a model."""

from pathlib import Path

import pytest

from agentrl.config import RunSettings
from agentrl.config.inapplicable import possibly_inapplicable
from agentrl.config.settings import Purpose
from agentrl.errors import SettingsError

HOST = "--engine openai --base-url http://h/v1 --hosted-model big"


def complete(line: str, purpose: Purpose = "rollout") -> RunSettings:
    return RunSettings.from_cli(f"{line} --env mine.py:Mine".split()).check_complete(purpose)


def refused(line: str, purpose: Purpose = "rollout") -> str:
    with pytest.raises(SettingsError) as raised:
        complete(line, purpose)
    return str(raised.value)


def test_it_needs_an_address_and_a_name_and_no_folder() -> None:
    said = refused("--engine openai")
    assert "--base-url" in said
    assert "--hosted-model" in said
    assert "--hf-checkpoint" not in said
    assert complete(HOST).hosted
    complete(f"{HOST} --eval-prompt-data dev dev.jsonl", "eval")


@pytest.mark.parametrize(
    "flags",
    [
        "--rollout-top-k 20",
        "--eval-top-k 5",
        "--eval-min-new-tokens 2",
        "--rollout-stop-token-ids 3",
        "--no-rollout-skip-special-tokens",
        "--rollout-max-context-len 100",
        "--rollout-max-prompt-len 100",
        "--engine-context-length 100",
        "--chat-template-path a.jinja",
        "--tool-call-parser none",
        "--custom-generate-function-path mine.py:play",
        "--agent claude",
        "--use-rollout-routing-replay",
        "--opd-teacher-url http://t",
    ],
)
def test_settings_that_a_hosted_model_does_not_support_are_refused(flags: str) -> None:
    flag = flags.split()[0].replace("--no-rollout-skip", "--rollout-skip")
    assert f"{flag} with --engine openai: " in refused(f"{HOST} {flags}")


def test_slimes_rollout_functions_are_refused_by_name() -> None:
    options = '--compat-options {"rollout_function_path":"mine.py:f"}'
    assert "rollout_function_path with --engine openai" in refused(f"{HOST} {options}")


def test_settings_that_a_hosted_model_supports_are_accepted() -> None:
    complete(
        f"{HOST} --rollout-temperature 0.3 --rollout-top-p 0.9 --rollout-stop x --rollout-top-k -1 --eval-top-k -1"
    )


@pytest.mark.parametrize("flags", ["", "--debug-rollout-only", "--backend local"])
def test_training_by_rl_names_the_flag_and_the_remedy(flags: str) -> None:
    said = refused(f"{HOST} --hf-checkpoint . {flags}", "train")
    assert "--engine openai: RL trains on token ids" in said
    assert "`agentrl sft`" in said


def test_one_file_may_serve_the_demonstrator_and_the_small_model() -> None:
    learns = "--sft-turns all --loss-type sft_loss --n-samples-per-prompt 1 --prompt-data x.jsonl"
    settings = RunSettings.from_cli(f"{HOST} --hf-checkpoint . --chat-template-path a.jinja {learns}".split())
    assert not settings.hosted


def test_a_variable_that_is_not_set_and_a_key_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    assert "--hosted-api-key-env MY_KEY: no such environment variable is set" in refused(
        f"{HOST} --hosted-api-key-env MY_KEY"
    )
    monkeypatch.setenv("MY_KEY", "SEKRET")
    settings = complete(f"{HOST} --hosted-api-key-env MY_KEY")
    assert settings.engine.api_key == "SEKRET"
    assert "SEKRET" not in repr(settings) + repr(settings.args) + str(settings.shown())
    said = refused(f"{HOST} --hosted-api-key-env sk-SEKRET")
    assert "expected the name of an environment variable, not a key" in said
    assert "SEKRET" not in said


def test_fields_of_agentrls_own_are_refused_among_the_options() -> None:
    assert "--hosted-options: messages, stream: agentrl sets this itself" in refused(
        f"{HOST} --hosted-options stream=true --hosted-options messages=x"
    )


def test_what_has_no_effect_beside_a_hosted_model_is_named(tmp_path: Path) -> None:
    said = "\n".join(possibly_inapplicable(RunSettings.from_cli([*HOST.split(), "--hf-checkpoint", "x"]), "rollout"))
    assert "--hf-checkpoint x has no effect with --engine openai" in said
