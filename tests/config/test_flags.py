"""Flags: every setting has one, slime's spellings work, and an error names flag, value and expectation."""

import pytest

from agentrl.config import RunSettings
from agentrl.config.fields import SECTIONS, all_fields
from agentrl.config.flags import ESSENTIAL, help_text, read_flags
from agentrl.errors import Blame, SettingsError
from agentrl.rollout.settings import FailureAction


def build(line: str) -> RunSettings:
    return RunSettings.from_cli(line.split())


def message(line: str) -> str:
    with pytest.raises(SettingsError) as caught:
        build(line)
    return str(caught.value)


def test_every_field_of_every_section_has_one_flag_with_help() -> None:
    names = [name for model in SECTIONS.values() for name in model.model_fields]
    assert sorted(names) == sorted(all_fields())
    for field in all_fields().values():
        assert (field.info.description or "").endswith("."), f"{field.name} has no one-sentence description"
        assert help_text(field)


def test_essential_settings_exist() -> None:
    assert [name for names in ESSENTIAL.values() for name in names if name not in all_fields()] == []


def test_sections_of_run_settings_are_the_sections_of_the_flags() -> None:
    assert set(RunSettings.model_fields) == set(SECTIONS)


def test_only_what_was_written_is_given() -> None:
    assert build("--lr 3e-4 --rollout-batch-size 4").given() == {"lr", "rollout_batch_size"}
    assert build("").given() == frozenset()


def test_one_environment_leaves_the_commands_argument_alone() -> None:
    values, _, rest = read_flags(["--env", "my.py:E", "runs/x"])
    assert (values, rest) == ({"env": "my.py:E"}, ["runs/x"])


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--lr 1e-5", "lr", 1e-5),
        ("--lr=1e-5", "lr", 1e-5),
        ("--rollout_batch_size 4", "rollout_batch_size", 4),
        ("--rollout-top-k -1", "rollout_top_k", -1),
        ("--use-wandb", "use_wandb", True),
        ("--no-use-tensorboard", "use_tensorboard", False),
        ("--use-tensorboard false", "use_tensorboard", False),
        ("--use-wandb=true", "use_wandb", True),
        ("--no-grpo-std-normalization", "grpo_std_normalization", False),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 512", "use_dynamic_batch_size", True),
        ("--actor-num-gpus-per-node 2", "actor_num_gpus_per_node", 2),
        ("--eps-clip-high none", "eps_clip_high", None),
        ("--kl-coef 0.1 --kl-loss-type k3", "kl_loss_type", "k3"),
        ("--env pkg.mod:Name", "env", "pkg.mod:Name"),
        ("--env a=x.py:A b=pkg.mod:B", "env", {"a": "x.py:A", "b": "pkg.mod:B"}),
        ("--env a=x.py:A --env b=pkg.mod:B", "env", {"a": "x.py:A", "b": "pkg.mod:B"}),
        ("--env x:Y --env-args size=3 --env-args name=x", "env_args", {"size": 3, "name": "x"}),
        ("--eval-prompt-data aime a.jsonl gsm8k b.jsonl", "eval_prompt_data", ("aime", "a.jsonl", "gsm8k", "b.jsonl")),
        (
            "--eval-prompt-data aime a.jsonl --eval-prompt-data gsm8k b.jsonl",
            "eval_prompt_data",
            ("aime", "a.jsonl", "gsm8k", "b.jsonl"),
        ),
        ("--rollout-stop-token-ids 7 8", "rollout_stop_token_ids", (7, 8)),
        ("--rollout-stop-token-ids [7,8]", "rollout_stop_token_ids", (7, 8)),
        ("--failure-policy tool=raise env=retry", "failure_policy", None),
    ],
)
def test_spellings(line: str, name: str, value: object) -> None:
    if name == "failure_policy":
        line, value = (
            "--failure-policy tool=raise --failure-policy env=retry",
            {
                Blame.TOOL: FailureAction.RAISE,
                Blame.ENV: FailureAction.RETRY,
            },
        )
    assert build(line).flat()[name] == value


def test_options_of_the_engine_server_are_collected() -> None:
    line = "--sglang-mem-fraction-static 0.8 --sglang-disable-cuda-graph --sglang-log-level info --sglang-tp-size=2"
    options_ = build(f"{line} --sglang-cuda-graph-bs 1 2 4").engine.sglang_options
    assert options_.pop("cuda_graph_bs") == [1, 2, 4]
    assert options_ == {"mem_fraction_static": 0.8, "disable_cuda_graph": True, "log_level": "info", "tp_size": 2}


def test_own_flags_that_begin_with_sglang_stay_own() -> None:
    settings = build("--sglang-server-concurrency 7")
    assert settings.engine.sglang_server_concurrency == 7
    assert settings.engine.sglang_options == {}


def test_json_object_for_a_mapping() -> None:
    values, *_ = read_flags(["--apply-chat-template-kwargs", '{"enable_thinking": false}'])
    assert values["apply_chat_template_kwargs"] == {"enable_thinking": False}
    values, *_ = read_flags(["--apply-chat-template-kwargs", "enable_thinking=false"])
    assert values["apply_chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--rollout-bach-size 3", ["unknown flag --rollout-bach-size", "did you mean --rollout-batch-size"]),
        ("--no-grpo-std-normalisation", ["did you mean --no-grpo-std-normalization"]),
        ("--rollout-batch-size many", ["--rollout-batch-size", "a whole number", "'many'"]),
        ("--rollout-batch-size 0", ["--rollout-batch-size", "more than 0", "'0'"]),
        ("--rollout-top-p 1.5", ["--rollout-top-p", "at most 1", "'1.5'"]),
        ("--lr fast", ["--lr", "a number", "'fast'"]),
        ("--kl-loss-type k9", ["--kl-loss-type", "one of k1, k2, k3, low_var_kl", "'k9'"]),
        ("--use-wandb=maybe", ["--use-wandb", "true or false", "'maybe'"]),
        ("--lr", ["--lr", "got nothing"]),
        ("--lr --use-wandb", ["--lr", "got nothing"]),
        ("--failure-policy tool", ["--failure-policy", "KEY=VALUE", "'tool'"]),
        ("--failure-policy bob=retry", ["--failure-policy", "'bob'", "'model', 'tool'"]),
        ("--rollout-stop-token-ids 1 x", ["--rollout-stop-token-ids", "'x'"]),
        ("--rollout-stop-token-ids [1,", ["--rollout-stop-token-ids", "not valid JSON"]),
        ("train.jsonl", ["train.jsonl"]),
    ],
)
def test_bad_input_is_named(line: str, parts: list[str]) -> None:
    found = message(line)
    assert [part for part in parts if part not in found] == [], found


def test_unknown_flags_come_at_once() -> None:
    found = message("--lrr 1e-5 --wholly-foreign x --lr 1e-5")
    assert found.splitlines() == [
        "2 settings need attention:",
        "  - unknown flag --lrr; did you mean --lr?",
        "  - unknown flag --wholly-foreign",
    ]


def test_wrong_values_are_told_with_what_is_unknown() -> None:
    found = message("--lrr 1 --lr fast --n-samples-per-prompt 0 --update-weights-interval 2 --failure-policy tool")
    assert found.splitlines()[1:] == [
        "  - unknown flag --lrr; did you mean --lr?",
        "  - --lr: expected a number, at least 0; got 'fast'",
        "  - --n-samples-per-prompt: expected a whole number, more than 0; got '0'",
        "  - --failure-policy: expected KEY=VALUE or a JSON object; got 'tool'",
    ], "a contradiction is for later"


@pytest.mark.parametrize("flag", ["--foreign-router-ip", "--rubric", "--gradient-something", "--no-such-num"])
def test_a_hint_is_given_only_where_it_is_likely(flag: str) -> None:
    assert message(f"{flag} 1") == f"unknown flag {flag}"


def test_all_problems_come_at_once() -> None:
    found = message("--rollout-batch-size x --lr y --kl-loss-type z")
    assert found.startswith("3 settings need attention")
    assert all(flag in found for flag in ("--rollout-batch-size", "--lr", "--kl-loss-type"))


def test_an_error_of_a_sections_own_validator_is_passed_on() -> None:
    assert "sequence_parallel needs tensor_model_parallel_size above 1" in message("--sequence-parallel")


def test_unknown_name_in_python_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match="did you mean rollout_batch_size"):
        RunSettings.from_flat({"rollout_batchsize": 3})


@pytest.mark.parametrize("flag", ["--rollout-top-k", "--eval-top-k"])
def test_top_k_of_nothing_is_refused(flag: str) -> None:
    assert "use -1 for all" in message(f"{flag} 0")
    assert build(f"{flag} -1").rollout


def test_no_number_is_infinite_or_none_at_all() -> None:
    floats = [field for field in all_fields().values() if field.kind is float]
    assert len(floats) > 30
    for field in floats:
        for text in ("nan", "inf", "-inf", "1e999"):
            with pytest.raises(SettingsError, match=f"{field.flag}: expected a finite number"):
                RunSettings.from_cli([f"{field.flag}={text}"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--apply-chat-template-kwargs", '{"a": ' + "[" * 9000], "not valid JSON"),
        (["--apply-chat-template-kwargs", '{"a": ' + "9" * 9000 + "}"], "not valid JSON"),
        (["--seed", "9" * 9000], "--seed: expected a whole number"),
        (["--sglang-x", "NaN"], "expected a finite number"),
    ],
)
def test_texts_that_cannot_be_read_are_named(argv: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        RunSettings.from_cli(argv)
    assert len(str(caught.value)) < 1500


def test_divisors_of_enormous_batches_are_proposed_at_once() -> None:
    with pytest.raises(SettingsError, match="set --num-steps-per-rollout 8"):
        RunSettings.from_cli(["--rollout-batch-size", str(10**18), "--num-steps-per-rollout", "7"])


def test_the_home_of_an_unknown_user_is_no_such_folder() -> None:
    settings = RunSettings.from_cli(["--hf-checkpoint", "~nobody-of-that-name/model", "--env", "a:b"])
    with pytest.raises(SettingsError, match="no such folder"):
        settings.check_complete("rollout")
