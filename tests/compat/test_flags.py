"""slime's and Megatron's settings: each is ours, agrees with ours, goes to `compat_options`, or is refused by name."""

import json
from pathlib import Path

import pytest

from agentrl.cli.main import run
from agentrl.compat.calls import namespace
from agentrl.compat.conformance import hooks
from agentrl.compat.facts import RUNS, SHAPES
from agentrl.compat.flags import FlagRow, Flags, table
from agentrl.config import RunSettings
from agentrl.config.fields import all_fields
from agentrl.errors import SettingsError
from tests.config.test_flags import build, message

FLAGS = Flags()

STATES = ("same", "set", "agrees", "own", "hint", "args", "refused", "called")


@pytest.mark.parametrize("row", table().values(), ids=lambda row: row.name)
def test_every_row_holds(row: FlagRow) -> None:
    flag = f"--{row.name.replace('_', '-').replace('*', 'x')}"
    assert row.state in STATES
    assert row.kind in ("flag", "one", "many")
    ours = row.name in all_fields() or flag.startswith(("--no-offload", "--sglang-p"))
    assert ours or row.state != "same"
    if row.default and row.name in all_fields():
        assert RunSettings.from_flat({row.name: json.loads(row.default)}).given() == {row.name}
    if ours:
        return
    assert bool(row.remedy) == (row.state in ("refused", "hint")) or row.state == "agrees"
    match row.state:
        case "set" | "called":
            targets = [word.rpartition(">")[2].partition("=")[0].partition("{")[0] for word in row.target.split()]
            assert set(targets) <= set(all_fields())
        case "agrees" if row.target == "config":
            assert row.name in SHAPES or row.name in RUNS
        case "agrees" if row.target.startswith("$"):
            assert "17" not in message(f"{flag} 17")
        case "agrees":
            assert build(f"{flag} {row.target.split()[0]}").given() == frozenset()
            assert message(f"{flag}=17").startswith(f"{flag} 17: it is ")
        case "own":
            assert row.name in FLAGS.ours(flag, ["x.py:f"])["compat_options"]
        case "hint":
            values = row.target.split() or ["" if row.kind == "flag" else "17"]
            for value in values:
                settings = build(f"{flag} {value}")
                assert settings.given() == {"compat_options"}
                assert list(FLAGS.notes(settings)) == [f"{flag}: {row.remedy}"]
            if row.target:
                assert message(f"{flag} 17") == f"{flag} 17: expected one of {', '.join(values)}"
        case "args":
            assert getattr(namespace(build("").args), row.name) == json.loads(row.default)
        case "refused":
            assert message(f"{flag} 1").startswith(f"{flag}: ")


DEEPSEEK = {"model_type": "deepseek_v3", "num_hidden_layers": 5, "n_routed_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8,
            "topk_group": 4, "kv_lora_rank": 512, "routed_scaling_factor": 2.5, "norm_topk_prob": True}  # fmt: skip
QWEN = {"model_type": "qwen2_moe", "num_hidden_layers": 4, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "of_deepseek", "of_qwen"),
    [
        ("num_experts", 256, 60),
        ("moe_ffn_hidden_size", 2048, 1408),
        ("moe_router_topk", 8, 4),
        ("moe_layer_freq", "[0]*3 + [1]*2", [0, 1, 0, 1]),
        ("moe_shared_expert_intermediate_size", 2048, 5632),
        ("moe_shared_expert_gate", False, True),
        ("moe_router_score_function", "sigmoid", "softmax"),
        ("moe_router_enable_expert_bias", True, False),
        ("moe_router_pre_softmax", True, True),
        ("moe_router_topk_scaling_factor", 2.5, 1.0),
        ("moe_router_num_groups", 8, 1),
        ("moe_router_group_topk", 4, 1),
        ("qk_layernorm", True, False),
    ],
)
def test_what_megatrons_flags_of_a_mixture_are_by_its_config(name: str, of_deepseek: object, of_qwen: object) -> None:
    for config, right, wrong in ((DEEPSEEK, of_deepseek, of_qwen), (QWEN, of_qwen, of_deepseek)):
        assert SHAPES[name](config, right) == right
        if wrong != right:
            assert SHAPES[name](config, wrong) != wrong
    assert SHAPES["moe_layer_freq"](DEEPSEEK, 1) == [0, 0, 0, 1, 1]


def test_a_bias_of_the_attention_is_by_the_config_unless_the_attention_has_none_to_read() -> None:
    bias = SHAPES["add_qkv_bias"]
    assert [bias(QWEN, given) for given in (True, False)] == [True, True]
    assert [bias({"model_type": "qwen3"}, given) for given in (True, False)] == [False, False]
    assert [bias(DEEPSEEK, given) for given in (True, False)] == [True, False]


def test_a_model_without_experts_has_none() -> None:
    assert SHAPES["num_experts"]({"model_type": "qwen3"}, 8) is None


def test_a_key_is_taken_where_the_environment_says_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert build("--wandb-key secret").given() == frozenset()
    assert "other" not in message("--wandb-key other")
    monkeypatch.delenv("WANDB_API_KEY")
    assert build("--wandb-key --use-wandb").given() == {"use_wandb"}


def test_slimes_teacher_is_asked_by_the_run() -> None:
    own = "slime.rollout.on_policy_distillation"
    line = f"--use-opd --opd-type sglang --custom-rm-path {own}.reward_func --rm-url http://x:1/generate"
    settings = build(f"{line} --custom-reward-post-process-path {own}.post_process_rewards")
    assert settings.rollout.opd_teacher_url == ("http://x:1",)
    assert settings.algorithm.advantage_estimator == "on_policy_distillation"
    assert (settings.rollout.custom_rm_path, settings.compat.compat_options) == (None, {})


def test_slimes_teacher_needs_its_address_and_no_other_hook() -> None:
    line = "--custom-rm-path slime.rollout.on_policy_distillation.reward_func"
    assert message(line) == f"{line} needs --rm-url, the address of the teacher"
    hook = "--custom-reward-post-process-path own.py:rewards"
    assert message(f"{line} --rm-url http://x:1/generate {hook}").startswith(
        f"{hook} with {line}: rewards are 0; leave"
    )


def test_slimes_defaults_and_what_slime_ignores() -> None:
    settings = build("--slime-defaults --kl-loss-type k3 --sequence-parallel --num-epoch 3 --num-rollout 7 --lr 1e-5")
    assert settings.rollout.n_samples_per_prompt == 1
    assert (settings.engine.engine, settings.train.save_interval, settings.train.lr) == ("sglang", None, 1e-5)
    assert settings.data.num_epoch is None
    assert list(FLAGS.notes(settings)) == [
        "--kl-loss-type k3 is left out: slime ignores it without --use-kl-loss or --kl-coef",
        "--num-epoch 3 is left out: slime ignores it with --num-rollout",
        "--sequence-parallel true is left out: slime ignores it without --tensor-model-parallel-size above 1",
    ]
    assert settings.replace(lr=1e-4).rollout.n_samples_per_prompt == 1
    assert (
        build("--slime-defaults --kl-loss-type k3 --kl-coef 0.1 --advantage-estimator ppo").algorithm.kl_loss_type
        == "k3"
    )
    assert build("--slime-defaults --rollout-external-engine-addrs x:1").engine.engine == "external"
    assert "has no effect without" in message("--kl-loss-type k3")


def test_a_custom_config_is_slimes_settings_and_keys_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("use_tis: true\ntis_mode: clip\nmax_tries: 3\nattention_dropout: 0.0\nlr: 1e-5\n")
    settings = build(f"--custom-config-path {file} --lr 1")
    assert (settings.algorithm.use_tis, settings.train.lr) == (True, 1e-5)
    assert (settings.args.tis_mode, settings.args.max_tries) == ("clip", 3)
    assert settings.args.custom_config_path == str(file)
    hooks = "rollout_sample_hook_path: [a.py:f, b.py:g]\nmultimodal_keys: {image: pictures}\n"
    file.write_text(f"{hooks}balance_by_flops: false\nrollout_sample_filter_path: null\n")
    (same := tmp_path / "same.yaml").write_text(file.read_text())
    for settings in (build(f"--custom-config-path {file}"), RunSettings.from_file(same)):
        assert settings.compat.compat_options["rollout_sample_hook_path"] == ["a.py:f", "b.py:g"]
        assert settings.data.image_key == "pictures"
        assert settings.compat.compat_options["balance_by_flops"] is False
        assert "rollout_sample_filter_path" not in settings.compat.compat_options
    file.write_text("hidden_dropout: 0.1\n")
    expected = "own.yaml line 1, hidden_dropout: --hidden-dropout 0.1: it is 0 here"
    assert expected in message(f"--custom-config-path {file}")
    file.write_text("max_tries: 3\nsglang_config: x.yaml\n")
    assert "own.yaml line 2, sglang_config: all engines are alike" in message(f"--custom-config-path {file}")


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--disable-grpo-std-normalization", {"grpo_std_normalization": False}),
        ("--disable-rewards-normalization false", {"rewards_normalization": True}),
        ("--tp 2 --pp 2 --actor-num-gpus-per-node 4", {"model_parallel_size": 4}),
        ("--use-tis --tis-threshold 3 --tis-lower-bound 0.5", {"tis_clip": 3.0, "tis_clip_low": 0.5}),
        ("--train-async", {"max_staleness": 1}),
        ("--train-async --max-staleness 3", {"max_staleness": 3}),
        ("--train-async --async-buffer-size 4", {"max_staleness": 4}),
    ],
)
def test_slimes_spellings_of_our_settings(line: str, values: dict[str, object]) -> None:
    settings = build(line)
    found = {**settings.flat(), "model_parallel_size": settings.train.model_parallel_size}
    assert {name: found[name] for name in values} == values


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--train-async --max-staleness 0", "--train-async is --max-staleness 1, and --max-staleness 0 says otherwise"),
        ("--train-async --max-staleness x", "--train-async is --max-staleness 1, and --max-staleness x says otherwise"),
        ("--max-staleness 1 --async-buffer-size 4", "--async-buffer-size 4 is --max-staleness 4, and"),
        ("--async-buffer-size -1", "--max-staleness: expected a whole number, at least 0; got '-1'"),
        ("--disable-rewards-normalization=maybe", "expected true or false; got 'maybe'"),
    ],
)
def test_another_spelling_must_not_contradict(line: str, said: str) -> None:
    assert said in message(line)


def test_defaults_of_the_loss_and_the_rate_are_slimes() -> None:
    found = build("--slime-defaults --train-async --lr 1e-5 --num-rollout 3")
    assert (found.train.lr_decay_style, found.algorithm.use_rollout_logprobs) == ("linear", False)
    assert build("--train-async").algorithm.use_rollout_logprobs is True
    assert build("--slime-defaults --loss-type sft_loss --sft-turns all").algorithm.use_rollout_logprobs is None


def test_every_hook_that_is_taken_is_called_by_somebody() -> None:
    assert {row.name for row in table().values() if row.state == "own"} - set(hooks()) == {"custom_config_path"}


def test_a_command_says_what_it_read_in_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.sh").write_text("ARGS=(--lr 1e-5)\n")
    (tmp_path / "run.sh").write_text(
        "source /container/slime/models/a.sh\npython train.py ${ARGS[@]} --kl-loss-type k3\n"
    )
    assert run(["train", "--dry-run", "--slime-script", f"{tmp_path}/run.sh", "--lr", "1e-4"]) == 2
    said = capsys.readouterr()
    assert f"note: run.sh line 1: there is no /container/slime/models/a.sh; read {tmp_path}/models/a.sh" in said.err
    assert "note: --kl-loss-type k3 is left out: slime ignores it without --use-kl-loss" in said.err
    assert "error: 2 settings need attention" in said.err or "--hf-checkpoint is missing" in said.err
    assert "lr = 0.0001" in said.out


def test_a_script_is_read_below_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "A=(\n  --lr 1e-5\n  --save ${X##y}\n  --sglang-a 1\n)\npython train_async.py ${A[@]} --moe-x $(date)\n"
    )
    with pytest.raises(SettingsError) as caught:
        build(f"--slime-script {file}")
    assert "--save: run.sh line 3: ${X##y} is not read" in str(caught.value)
    assert "moe" not in str(caught.value), "what is refused anyway needs no value"
    assert "run.sh: --moe-x: mixtures of experts" in message(f"--slime-script {file} --save s")
    file.write_text(file.read_text().replace("--moe-x $(date)", ""))
    settings = build(f"--slime-script {file} --save s --sglang-b 2 --n-samples-per-prompt 3")
    assert (settings.train.lr, settings.train.save, settings.rollout.max_staleness) == (1e-5, "s", 1)
    assert (settings.rollout.n_samples_per_prompt, settings.engine.sglang_options) == (3, {"a": 1, "b": 2})
    file.write_text("python train.py --lr fast\n")
    assert "run.sh line 1, --lr: expected a number" in message(f"--slime-script {file}")


def test_a_shape_that_only_running_the_script_would_tell_is_left_to_the_model(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text('printf -v FREQ "%s" "[1]"\npython train.py --moe-layer-freq $FREQ --moe-grouped-gemm --lr 1e-5\n')
    argv, _, notes = FLAGS.script(str(file), ())
    assert argv == ["--slime-defaults", "--moe-grouped-gemm", "--lr", "1e-5"]
    assert notes == ["--moe-layer-freq is left out: run.sh line 1: `printf` sets it; config.json says it"]


def test_hints_with_one_reason_are_one_note() -> None:
    said = list(FLAGS.notes(build("--moe-enable-deepep --mtp-num-layers 1 --moe-permute-fusion --enable-mtp-training")))
    assert [note.partition(":")[0] for note in said] == [
        "--moe-enable-deepep, --moe-permute-fusion",
        "--mtp-num-layers, --enable-mtp-training",
    ]
    assert "a draft model made of them grows stale" in said[1]


def test_what_a_script_does_not_tell_is_given_after_it(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("X=$(nvidia-smi)\npython train.py --lr $X --custom-rollout-log-function-path $X\n")
    said = message(f"--slime-script {file}")
    assert "; give --lr after the script" in said
    assert "; give --custom-rollout-log-function-path after the script" in said
    settings = build(f"--slime-script {file} --lr 1e-5 --custom-rollout-log-function-path json:dumps")
    assert settings.train.lr == 1e-5
    assert settings.args.custom_rollout_log_function_path == "json:dumps"


def test_a_name_of_other_trainers_is_proposed_ours() -> None:
    assert message("--learning-rate 1") == "unknown flag --learning-rate; did you mean --lr?"
    assert message("--model m") == "unknown flag --model; did you mean --hf-checkpoint?"
    assert FLAGS.called().keys().isdisjoint(all_fields())


def test_unknown_flags_come_at_once_and_those_with_one_answer_together() -> None:
    found = message("--moe-x 3 --lrr 1e-5 --moe-y 8 16 --sglang-router-ip 1 --hidden-dropout 0.5 --lr 1e-5")
    assert found.splitlines() == [
        "4 settings need attention:",
        "  - unknown flag --lrr; did you mean --lr?",
        "  - --moe-x, --moe-y: mixtures of experts are trained as config.json says; leave them out",
        "  - --sglang-router-ip: the run balances and watches its engines itself; for a router of your own give its "
        "address to --rollout-external-engine-addrs",
        "  - --hidden-dropout 0.5: it is 0 here (nothing is dropped: the policy that is trained is the one that sampled); leave the flag out",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--update-weight-mode full --update-weight-transport disk", {"update_weight_mode": "disk"}),
        ("--update-weight-transport=nccl", {"update_weight_mode": "broadcast"}),
        ("--rollout-health-check-timeout 7", {"engine_hang_timeout": 7.0}),
        (
            "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss",
            {"sft_turns": "all"},
        ),
        ("--rollout-function-path slime.rollout.sglang_rollout.generate_rollout", {"compat_options": {}}),
        ("--swiglu --attention-dropout 0.0 --custom_config-path x.yaml", None),
        (
            "--rollout-sample-hook-path a.b --rollout-sample-hook-path c.d",
            {"compat_options": {"rollout_sample_hook_path": ["a.b", "c.d"]}},
        ),
    ],
)
def test_what_is_said_otherwise_here(line: str, expected: dict[str, object] | None) -> None:
    if expected is None:
        assert "--custom-config-path: no file" in message(line)
        return
    flat = build(line).flat()
    assert {name: flat[name] for name in expected} == expected


def test_a_settings_file_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("num-layers: 36\nrollout_health_check_timeout: 7\nswiglu: true\nattention_dropout: 0.0\n")
    settings = RunSettings.from_file(file)
    assert settings.engine.engine_hang_timeout == 7
    assert settings.args.num_layers == 36
    file.write_text("hidden_dropout: 0.1\nmoe_x: 3\n")
    with pytest.raises(
        SettingsError, match=r"line 1: --hidden-dropout 0.1: it is 0 here(.|\n)*line 2: moe_x: mixtures"
    ):
        RunSettings.from_file(file)


def test_hooks_of_what_fine_tuning_does_not_do_are_refused() -> None:
    said = message("--sft-turns all --rollout-sample-filter-path f.py:keep --custom-megatron-init-path f.py:init")
    assert said == "--rollout-sample-filter-path has no effect with agentrl sft, which plays nothing; leave it out"


def test_keys_of_images_become_the_images_field() -> None:
    assert build('--multimodal-keys {"image":"images"}').data.image_key == "images"
    assert "the key 'image' alone" in message('--multimodal-keys {"image":"i","video":"v"}')


@pytest.mark.parametrize(
    ("flags", "length"),
    [
        ("", None),
        ("--rollout-max-context-len 40", 40),
        ("--eval-max-context-len 30", 30),
        ("--rollout-max-context-len 40 --eval-max-context-len 30", 30),
    ],
)
def test_functions_of_evaluations_are_told_the_context_of_evaluations(flags: str, length: int | None) -> None:
    args = namespace(build(flags).args)
    assert args.eval_max_context_len == length
