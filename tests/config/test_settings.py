"""Settings that are valid alone but not together, and the proposed numbers."""

import json
import pickle
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import Args, RunSettings
from agentrl.errors import SettingsError
from tests.support.nightly import examples


def build(line: str) -> RunSettings:
    return RunSettings.from_cli(shlex.split(line))


def message(line: str) -> str:
    with pytest.raises(SettingsError) as caught:
        build(line)
    return str(caught.value)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Make a model folder for layout checks: a config.json with 4 heads, 2 key-value heads, 6 layers."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 6,
        "max_position_embeddings": 256,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- batch arithmetic -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "batch", "steps"),
    [
        ("", 128, 1),
        ("--num-steps-per-rollout 4", 32, 4),
        ("--global-batch-size 64", 64, 2),
        ("--global-batch-size 32 --num-steps-per-rollout 4", 32, 4),
    ],
)
def test_batch_and_steps_are_filled_in(line: str, batch: int, steps: int) -> None:
    found = build(f"--rollout-batch-size 16 --n-samples-per-prompt 8 {line}")
    assert (found.train.global_batch_size, found.train.num_steps_per_rollout) == (batch, steps)
    assert found.args.global_batch_size == batch
    assert "global_batch_size" not in found.given() or "--global-batch-size" in line


def test_filled_in_values_follow_a_change() -> None:
    assert build("--rollout-batch-size 16").replace(rollout_batch_size=4).train.global_batch_size == 32


def test_sections_of_another_run_can_be_taken_over() -> None:
    one = build("--rollout-batch-size 16 --global-batch-size 64")
    assert RunSettings(rollout=one.rollout, train=one.train) == one


def test_batch_message_shows_numbers_and_proposes() -> None:
    found = message("--rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 100")
    assert "--rollout-batch-size 16 x --n-samples-per-prompt 8 = 128" in found
    assert "--global-batch-size 128" in found


@settings(max_examples=examples(1.5), deadline=None)
@given(
    prompts=st.integers(1, 40),
    n=st.integers(1, 16),
    batch=st.none() | st.integers(1, 300),
    steps=st.none() | st.integers(1, 8),
)
def test_every_proposal_works(prompts: int, n: int, batch: int | None, steps: int | None) -> None:
    base = {"rollout_batch_size": prompts, "n_samples_per_prompt": n}
    base |= {} if batch is None else {"global_batch_size": batch}
    base |= {} if steps is None else {"num_steps_per_rollout": steps}
    try:
        found = RunSettings.from_flat(base)
    except SettingsError as error:
        text = str(error)
        assert "; set --" in text
        for proposal in text.split("; set ")[1].split(" or "):
            words = re.findall(r"--([a-z-]+) (\d+)", proposal)
            assert words
            RunSettings.from_flat({**base, **{name.replace("-", "_"): int(value) for name, value in words}})
    else:
        train = found.train
        assert train.global_batch_size is not None
        assert prompts * n == train.global_batch_size * train.num_steps_per_rollout


# ---- layouts ----------------------------------------------------------------------------------------------


def test_world_must_hold_the_layout() -> None:
    found = message("--actor-num-gpus-per-node 6 --tensor-model-parallel-size 4")
    assert "= 6 processes of the actor" in found
    assert "use 4 or 8 processes" in found


def test_model_must_split(model: Path) -> None:
    tensor = message(f"--hf-checkpoint {model} --actor-num-gpus-per-node 4 --tensor-model-parallel-size 4")
    assert "2 key-value heads" in tensor
    assert "sizes that do: 1, 2" in tensor
    pipeline = message(f"--hf-checkpoint {model} --actor-num-gpus-per-node 4 --pipeline-model-parallel-size 4")
    assert "6 layers" in pipeline
    assert "1, 2, 3, 6" in pipeline
    assert (
        build(
            f"--hf-checkpoint {model} --actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
        ).train.model_parallel_size
        == 4
    )


def test_each_data_parallel_rank_needs_a_sample() -> None:
    assert "use at least 4" in message(
        "--actor-num-gpus-per-node 4 --rollout-batch-size 1 --n-samples-per-prompt 2 --global-batch-size 2"
    )


def test_engines_share_devices_evenly() -> None:
    assert "--rollout-num-gpus 2 or 4" in message("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2")
    assert "the built-in engine uses one device" in message("--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2")


def test_lengths_must_fit(model: Path) -> None:
    found = message(f"--hf-checkpoint {model} --rollout-max-prompt-len 100 --rollout-max-response-len 200")
    assert "= 300 tokens" in found
    assert "at most 156" in found
    assert "256 tokens" in message(f"--hf-checkpoint {model} --rollout-max-context-len 300")
    assert "at most 99" in message("--rollout-max-context-len 100 --rollout-max-response-len 100")
    assert build(f"--hf-checkpoint {model}").rollout.rollout_max_response_len > 256, "a default gives way"


def test_a_custom_generate_may_use_the_tools_of_an_environment() -> None:
    assert build("--env a:B --custom-generate-function-path c.py").rollout.env == "a:B"


def test_shared_devices() -> None:
    found = build("--colocate --actor-num-gpus-per-node 4 --rollout-num-gpus-per-engine 2 --engine sglang")
    c = found.cluster
    assert (c.rollout_num_gpus, c.num_engines, c.offload_train, c.offload_rollout) == (4, 2, True, True)
    assert found.engine.sglang_options == {"enable_memory_saver": True}
    adapter = build(
        "--colocate --engine sglang --lora-rank 8 --sglang-speculative-algorithm EAGLE"
    ).engine.sglang_options
    assert adapter["enable_weights_cpu_backup"] is adapter["enable_draft_weights_cpu_backup"] is True
    assert "rollout_num_gpus" not in found.given()
    assert found.replace(actor_num_gpus_per_node=2).cluster.rollout_num_gpus == 2
    fewer = build("--colocate --actor-num-gpus-per-node 4 --rollout-num-gpus 2 --no-offload-train").cluster
    assert (fewer.rollout_num_gpus, fewer.offload_train, fewer.offload_rollout) == (2, False, True)
    assert "the trainer has 2 devices, and --rollout-num-gpus is 3; use at most 2" in message(
        "--colocate --actor-num-gpus-per-node 2 --rollout-num-gpus 3"
    )
    assert "--colocate with --max-staleness 1: on shared devices nothing" in message("--colocate --max-staleness 1")
    assert build("--no-offload-train").cluster.offload_train is False


def test_what_lies_on_one_machine_fits_onto_it() -> None:
    assert build("--num-gpus-per-node 4 --actor-num-gpus-per-node 4").cluster.num_gpus_per_node == 4
    for name in ("actor-num-gpus-per-node", "critic-num-gpus-per-node"):
        assert f"--{name} 8 is more than --num-gpus-per-node 4; use at most 4" in message(
            f"--num-gpus-per-node 4 --{name} 8 --rollout-num-gpus 8"
        )


def test_groups_of_engines_are_numbers_or_addresses_and_some_layouts_have_no_room_for_them() -> None:
    given = build("--engine-groups opponent=2 --engine-groups eval=a:1,b:2 --eval-while-training")
    assert given.engine.engine_groups == {"opponent": 2, "eval": "a:1,b:2"}
    assert given.engine.started_groups == {"opponent": 2}
    for said in ("0", "nowhere"):
        assert "--engine-groups: " in message(f"--engine-groups opponent={said}")
    assert "--engine-groups a: not with --colocate; start the engines" in message("--colocate --engine-groups a=1")
    assert "not with --engine external; start the engines" in message("--engine-groups a=1 --engine external")
    assert "--engine-groups eval with --rollout-workers: not supported" in message(
        "--engine-groups eval=1 --rollout-workers 2"
    )
    assert "evaluation needs engines of its own" in message("--eval-while-training --engine-groups a=1")


@pytest.mark.parametrize(
    ("option", "flag"), [("host 0", "engine-host"), ("port 1", "engine-port-base"), ("model-path m", "hf-checkpoint")]
)
def test_options_of_the_launcher_are_not_given_to_sglang_itself(option: str, flag: str) -> None:
    said = message(f"--engine sglang --sglang-{option}")
    assert f"--sglang-{option.split()[0]}: a run gives its engines this option itself; use --{flag}" in said


@pytest.mark.parametrize("address", ["node1", "node1:", ":6379"])
def test_the_address_of_a_cluster_has_a_host_and_a_port(address: str) -> None:
    assert f"--ray-address: {address} is no address; expected HOST:PORT, for example" in message(
        f"--ray-address {address}"
    )
    for good in ("auto", "local", "[::1]:6379", "ray://head:10001"):
        assert build(f"--ray-address {good}").cluster.ray_address == good


def test_memory_by_handles_is_for_trainers_beside_sglang() -> None:
    good = "--update-weight-mode ipc --colocate --engine sglang"
    for more in ("", " --actor-num-gpus-per-node 2", " --actor-num-gpus-per-node 4 --rollout-num-gpus-per-engine 2"):
        assert build(good + more).cluster.update_weight_mode == "ipc"
    assert "leave --sglang-pp-size out" in message(f"{good} --sglang-pp-size 2")
    for bad in ("--update-weight-mode ipc", f"{good} --engine embedded"):
        assert "--update-weight-mode ipc: trainer processes share" in message(bad)


def test_details_are_samples_of_every_rollout() -> None:
    found = build("--dump-details d")
    assert found.observability.save_debug_rollout_data == "d/rollout_data/{rollout_id}.jsonl"
    assert found.given() == {"dump_details"}
    kept = build("--dump-details d --save-debug-rollout-data mine").observability
    assert kept.save_debug_rollout_data == "mine"


def test_over_sampling() -> None:
    assert "at least 16" in message("--over-sampling-batch-size 4 --rollout-batch-size 16")


def test_lengths_of_the_loss_are_those_of_the_rollout() -> None:
    found = build("--rollout-max-response-len 500 --loss-denominator constant")
    assert found.algorithm.loss_max_length == 500
    assert "loss_max_length" not in found.given()
    assert found.replace(rollout_max_response_len=200).algorithm.loss_max_length == 200
    assert build("--overlong-buffer-len 100 --loss-max-length 400").algorithm.loss_max_length == 400
    assert build("--rollout-max-response-len 500").algorithm.loss_max_length is None
    assert "use at most 500" in message("--overlong-buffer-len 600 --rollout-max-response-len 500")


def test_broken_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in message(f"--hf-checkpoint {tmp_path}")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --critic-num-gpus-per-node 3",
            "= 3 processes of the critic cannot hold",
        ),
        (
            "--critic-num-nodes 4 --global-batch-size 2 --rollout-batch-size 2 --n-samples-per-prompt 1",
            "4 data-parallel",
        ),
        ("--lr-decay-iters 4 --critic-lr-warmup-iters 4", "critic_lr_warmup_iters 4 must be below"),
    ],
)
def test_a_critic_that_cannot_be_is_refused(line: str, words: str) -> None:
    assert words in message(f"--advantage-estimator ppo {line}")


def test_several_contradictions_come_at_once() -> None:
    found = message("--actor-num-gpus-per-node 3 --tensor-model-parallel-size 2 --global-batch-size 100")
    assert found.startswith("2 settings need attention")


# ---- completeness -----------------------------------------------------------------------------------------


def test_what_is_missing_is_said(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n")
    with pytest.raises(SettingsError, match="(?s)--hf-checkpoint is missing.*--prompt-data FILE"):
        RunSettings().check_complete("train")
    with pytest.raises(SettingsError, match="no such folder"):
        build(f"--hf-checkpoint {tmp_path}/nowhere --prompt-data {data}").check_complete("train")
    with pytest.raises(SettingsError, match="no such file"):
        build(f"--hf-checkpoint {model} --prompt-data {tmp_path}/no.jsonl").check_complete("rollout")
    with pytest.raises(SettingsError, match="--eval-prompt-data NAME PATH"):
        build(f"--hf-checkpoint {model}").check_complete("eval")
    complete = build(f"--hf-checkpoint {model} --prompt-data {data}@[0:1]")
    assert complete.check_complete("train") is complete


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--rollout-temperature 0", "--eval-temperature 0 evaluates greedily"),
        ("--n-samples-per-prompt 1", "use at least 2, or --no-rewards-normalization"),
        ("--critic-lr 0", "--critic-lr 0.0 has no effect with an algorithm that learns no critic"),
        (
            "--ref-load x",
            "--ref-load x has no effect with an algorithm that reads no reference model; set --use-kl-loss",
        ),
        ("--critic-num-gpus-per-node 2", "--critic-num-gpus-per-node 2 has no effect with an algorithm that learns no"),
        ("--advantage-estimator ppo --num-critic-only-steps 9 --num-rollout 9", "the actor would not learn in"),
        ("--eval-interval 5", "--eval-interval 5 has no effect without --eval-prompt-data"),
    ],
)
def test_what_cannot_train_is_refused_for_training_only(model: Path, tmp_path: Path, line: str, words: str) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n")
    found = build(f"--hf-checkpoint {model} --prompt-data {data} {line}")
    with pytest.raises(SettingsError, match=words):
        found.check_complete("train")
    assert found.check_complete("rollout") is found


def test_one_sample_a_prompt_trains_where_rewards_are_not_compared(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n")
    (tmp_path / "own.py").write_text("def advantages(inputs, settings): ...\n")
    own = f"--advantage-estimator {tmp_path}/own.py:advantages"
    base = f"--hf-checkpoint {model} --prompt-data {data} --n-samples-per-prompt 1"
    for line in ("--no-rewards-normalization", "--loss-type sft_loss", own):
        assert build(f"{base} {line}").check_complete("train")


# ---- carrying ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "engines"),
    [
        ("", None),
        ("--max-staleness 4", True),
        ("--advantage-estimator dppo", True),
        ("--advantage-estimator dppo --use-tis", False),
        ("--max-staleness 4 --use-tis", False),
        ("--max-staleness 4 --use-rs", False),
        ("--max-staleness 4 --use-opsm", True),
        ("--max-staleness 4 --no-use-rollout-logprobs", False),
    ],
)
def test_whose_the_old_log_probs_are(line: str, engines: bool | None) -> None:
    assert build(line).algorithm.use_rollout_logprobs is engines


def test_a_mask_of_stale_tokens_must_mask_some() -> None:
    assert build("--max-staleness 4 --max-token-staleness 2").rollout.max_token_staleness == 2
    assert "--max-token-staleness 2 has no effect: --max-staleness 2 allows no older token" in message(
        "--max-staleness 2 --max-token-staleness 2"
    )
    masked = "--partial-rollout --max-staleness 3 --mask-offpolicy-in-partial-rollout --max-token-staleness 1"
    assert "masks all older tokens" in message(masked)


def test_settings_pickle_and_go_through_json() -> None:
    found = build("--lr 1e-5 --global-batch-size 64")
    assert pickle.loads(pickle.dumps(found)) == found
    assert pickle.loads(pickle.dumps(found)).given() == found.given()
    assert RunSettings.model_validate_json(found.model_dump_json()) == found


def test_args_is_a_read_only_flat_view() -> None:
    args = build("--max-turns 3 --rollout-batch-size 4 --sglang-tp-size 2").args
    assert (args.max_turns, args.rollout_batch_size, args.sglang_tp_size) == (3, 4, 2)
    assert "lr" in args
    assert "lr" in dir(args)
    assert args.engine == "embedded"
    with pytest.raises(AttributeError, match="read-only"):
        args.max_turns = 5
    with pytest.raises(AttributeError, match="read-only"):
        del args.max_turns
    with pytest.raises(AttributeError, match="did you mean max_turns"):
        _ = args.max_turn
    assert getattr(args, "my_own_flag", "default") == "default"


def test_args_pickles_copies_and_compares() -> None:
    import copy

    args = build("--max-turns 3").args
    for other in (pickle.loads(pickle.dumps(args)), copy.copy(args), copy.deepcopy(args)):
        assert other == args
    assert args != Args({"max_turns": 4})


def test_keys_of_a_users_own_are_in_args_and_win_there_alone() -> None:
    settings = RunSettings.from_flat({"compat_options": {"max_tries": 3, "tis_mode": "clip"}})
    assert (settings.args.max_tries, settings.args.tis_mode) == (3, "clip")
    assert settings.algorithm.tis_mode == "truncate"


def test_former_names_of_settings_are_still_read(tmp_path: Path) -> None:
    flags = "--mask-staleness 2 --max-staleness 4 --ledger-keep always --no-reduce-to-fit --stale-groups remake"
    file = tmp_path / "run.yaml"
    file.write_text(
        "mask_staleness: 2\nmax_staleness: 4\nbuffer: {ledger_keep: always}\nreduce_to_fit: false\nstale_groups: remake\n"
    )
    for made in (
        build(flags),
        RunSettings.from_file(file),
        RunSettings.from_flat({"mask_staleness": 2, "max_staleness": 4, "ledger_keep": "always"}),
    ):
        assert (made.rollout.max_token_staleness, made.buffer.ledger_retention) == (2, "always")
        assert (made.args.mask_staleness, made.rollout.stale_groups) == (2, "regenerate")
