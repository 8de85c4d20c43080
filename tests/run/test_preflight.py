"""Errors of `agentrl train`, `rollout` and `eval` for mistakes in their inputs: at once, before any process starts."""

import json
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import run
from agentrl.config import Purpose, RunSettings
from agentrl.errors import AgentRLError, SettingsError
from agentrl.media import Image
from agentrl.run.preflight import preflight
from agentrl.runfolder import MANIFEST, RunFolder
from agentrl.train.checkpoints import FORMAT
from tests.support.nightly import nightly
from tests.support.runs import RunKit
from tests.support.tiny_models import CHAT_TEMPLATE, make_tiny_model
from tests.support.vision import picture

PLUGINS = """
from agentrl import Environment, Step


class Ungraded(Environment):
    pass


class Paid(Environment):
    async def step(self, turn):
        return Step(done=True, reward=1.0)


class Early(Environment):
    @classmethod
    async def setup(cls, args):
        raise AssertionError("nothing of the user's code is called before the run starts")

    async def reward(self, sample):
        return 1.0


def function(args, samples):
    return samples


async def four(a, b, c, d):
    return a


def nothing():
    return 1


class Source:
    def get_samples(self, n):
        raise AssertionError("not built, not called")
"""


TWO = ("add=env.py:AddEnv", "own=plugins.py:Ungraded")
PURPOSES: tuple[Purpose, ...] = ("train", "rollout", "eval")
NAMED: list[dict[str, Any]] = [{"env": "add"}, {"metadata": {"env": "own"}}, {"env": "nobody"}]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    kit = RunKit.make(Path(tmp_path_factory.mktemp("kit")), prompts=8)
    (kit.folder / "plugins.py").write_text(PLUGINS)
    (kit.folder / "syntax.py").write_text("class Env(Environment)\n    pass\n")
    (kit.folder / "raises.py").write_text("x = 1\ny = nowhere\n")
    (kit.folder / "broken.jsonl").write_text('{"input": "a"}\n{"input": "b"}\n{"input": "c"\n')
    (kit.folder / "odd_calls.jinja").write_text(CHAT_TEMPLATE.replace("tool_call>", "call>"))
    (kit.folder / "one_dump").mkdir()
    (kit.folder / "one_dump" / "0.jsonl").write_text("")
    (kit.folder / "others").mkdir()
    (kit.folder / "others" / "latest_checkpointed_iteration.txt").write_text("20")
    rows = [json.dumps({"input": "a", "label": "x", **row}) for row in NAMED]
    (kit.folder / "named.jsonl").write_text("\n".join(rows))
    (kit.folder / "empty.jsonl").write_text("\n")
    (kit.folder / "objects.jsonl").write_text('{"input": "a", "label": {"a": 1}}\n' * 2)
    image = {"type": "image", "image": Image.from_bytes(picture(64, 64)).url}
    rows = [json.dumps({"input": given, "label": "x"}) for given in ("a", [{"role": "user", "content": [image]}])]
    (kit.folder / "seen.jsonl").write_text("\n".join(rows))
    for name in ("no_tokenizer", "no_weights"):
        (kit.folder / name).mkdir()
        (kit.folder / name / "config.json").write_text((kit.folder / "model" / "config.json").read_text())
    (kit.folder / "no_weights" / "tokenizer.json").write_text("{}")
    shutil.copytree(kit.folder / "model", kit.folder / "stranger")
    config = json.loads((kit.folder / "model" / "config.json").read_text())
    shutil.copytree(kit.folder / "model", kit.folder / "float8")
    float8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (kit.folder / "float8" / "config.json").write_text(json.dumps(config | float8))
    (kit.folder / "odd").mkdir()
    (kit.folder / "odd" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    tokenizer = json.loads((kit.folder / "stranger" / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (kit.folder / "stranger" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return kit


@pytest.fixture
def here(kit: RunKit, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunKit]:
    monkeypatch.chdir(kit.folder)
    yield kit
    assert not (kit.folder / "run").exists(), "the run's folder was made in spite of the mistake"


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail. Returns its message."""
    assert run(arguments) == 2
    said = capsys.readouterr()
    assert next(line for line in said.err.splitlines() if not line.startswith("note: ")).startswith("error: ")
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"hf_checkpoint": "nowhere"}, ["--hf-checkpoint nowhere: no such folder"]),
        ({"hf_checkpoint": "modle"}, ["--hf-checkpoint modle: no such folder; did you mean model?"]),
        ({"hf_checkpoint": "one_dump/modle"}, ["one_dump/modle: no such folder; one_dump has no modle"]),
        ({"hf_checkpoint": "no_tokenizer"}, ["--hf-checkpoint no_tokenizer: no tokenizer.json"]),
        ({"hf_checkpoint": "no_weights"}, ["no_weights: expected model.safetensors"]),
        ({"hf_checkpoint": "float8"}, ["float8: its weights are float8", "`agentrl convert float8 DIR --to hf`"]),
        ({"save": "stranger", "load": "stranger"}, ["--save stranger: the run starts from weights in this folder"]),
        ({"save_hf": "others"}, ["--save-hf others: the model would replace this folder; name a new one"]),
        ({"save_hf": "model"}, ["--save-hf model: the model would replace this folder; name a new one"]),
        ({"record_memory_history": True}, ["--record-memory-history records CUDA's memory, and the device is a CPU"]),
        ({"sglang_quantization": "fp8"}, ["--sglang-quantization fp8: the trainer sends weights in the form of"]),
        ({"prompt_data": "nowhere.jsonl"}, ["--prompt-data nowhere.jsonl: no such file"]),
        ({"prompt_data": "broken.jsonl", "label_key": None}, ["broken.jsonl line 3: malformed JSON at column 14"]),
        ({"prompt_data": "empty.jsonl"}, ["empty.jsonl is empty"]),
        ({"prompt_data": "prompts.jsonl@[9:]"}, ["the slice is empty", "8 rows"]),
        ({"prompt_data": "seen.jsonl"}, ["row 2 has an image", "--hf-checkpoint model sees text only"]),
        ({"input_key": "question"}, ["line 1", "no field 'question'", "'input', 'label'", "--input-key"]),
        ({"label_key": "answer"}, ["line 1", "no field 'answer'", "'input', 'label'", "--label-key"]),
        ({"env": "nowhere.py:Env"}, ["--env", "no such file", "nowhere.py"]),
        ({"env": "env.py:AddEnf"}, ["--env", "did you mean 'AddEnv'"]),
        ({"env": "syntax.py:Env"}, ["--env", "SyntaxError", "syntax.py, line 1"]),
        ({"env": "raises.py:Env"}, ["--env", "NameError", "raises.py:2"]),
        (
            {"env": "plugins.py:function"},
            ["expected a class that subclasses agentrl.Environment, got function function"],
        ),
        ({"env": None}, ["nothing gives an answer a reward", "--rm-type", "--env", "--custom-generate-function-path"]),
        ({"env_args": "size=3"}, ["--env-args: AddEnv has no argument 'size'; it takes none"]),
        ({"env": None, "env_args": "size=3"}, ["--env-args has no effect without --env"]),
        ({"env_key": "task"}, ["--env-key task has no effect without several environments"]),
        ({"env": TWO}, ["prompts.jsonl line 1: the run has several environments, add, own", "names none", "--env-key"]),
        ({"env": TWO, "prompt_data": "named.jsonl"}, ["named.jsonl line 3", "the row names 'nobody'"]),
        ({"env": TWO, "prompt_data": "named.jsonl@[:2]"}, ["nothing grades a trajectory: Ungraded"]),
        ({"env": TWO, "prompt_data": "named.jsonl", "env_key": "label"}, ["line 1", "the row names 'x'"]),
        ({"env": (*TWO, "c=env.py:AddEnv"), "prompt_data": "named.jsonl@[:2]", "rm_type": "f1"}, ["--env c: no row"]),
        ({"env": TWO, "prompt_data": None}, ["no prompts: with several environments a row says"]),
        ({"prompt_data": None}, ["no prompts", "AddEnv has no reset", "--prompt-data"]),
        (
            {"env": "plugins.py:Ungraded"},
            ["nothing grades", "Ungraded", "Step(reward=...)", "--rm-type", "--custom-rm-path"],
        ),
        ({"env": "plugins.py:Ungraded", "rm_type": "exact"}, ["--rm-type 'exact'", "did you mean 'exact_match'"]),
        ({"env": "plugins.py:Ungraded", "rm_type": "f1", "label_key": None}, ["--rm-type f1", "--label-key"]),
        ({"env": None, "custom_generate_function_path": "plugins.py:function"}, ["plain function", "async def"]),
        ({"env": None, "custom_generate_function_path": "plugins.py:four"}, ["(args, samples)", "(a, b, c, d)"]),
        ({"custom_rm_path": "plugins.py:nothing"}, ["--custom-rm-path", "got 0 arguments"]),
        ({"custom_rm_path": "plugins.py:nothin"}, ["--custom-rm-path", "did you mean 'nothing'"]),
        ({"dynamic_sampling_filter_path": "plugins.py:four"}, ["--dynamic-sampling-filter-path", "plain function"]),
        ({"data_source_path": "plugins.py:Source"}, ["Source has no method 'add_samples'"]),
        ({"buffer_filter_path": "plugins.py:filtre"}, ["--buffer-filter-path", "no 'filtre'"]),
        ({"advantage_estimator": "plugins.py:mine"}, ["--advantage-estimator", "no 'mine'"]),
        ({"eval_prompt_data": "nowhere.jsonl"}, ["--eval-prompt-data nowhere", "does not exist"]),
        ({"eval_prompt_data": "broken.jsonl", "label_key": None}, ["--eval-prompt-data broken", "line 3"]),
        ({"chat_template_path": "nowhere.jinja"}, ["--chat-template-path", "no file 'nowhere.jinja'"]),
        ({"tool_call_parser": "hermez"}, ["--tool-call-parser 'hermez'", "hermes"]),
        (
            {"chat_template_path": "odd_calls.jinja"},
            ["--tool-call-parser auto", "'none'", "<call>", "pkg.mod:function"],
        ),
        ({"tool_call_parser": "llama3"}, ["--tool-call-parser llama3", "does not read", "<tool_call>"]),
        ({"engine": "external"}, ["--rollout-external-engine-addrs HOST:PORT"]),
        ({"load": "no_weights"}, ["--load no_weights: expected model.safetensors"]),
        ({"load": "nowhere"}, ["--load nowhere: no complete checkpoint", "--hf-checkpoint model"]),
        (
            {"load": "others", "save": "others"},
            ["iteration.txt: '20', but", "others/iter_0000020 is not a torch_dist checkpoint"],
        ),
        ({"load_debug_rollout_data": "dumps"}, ["--load-debug-rollout-data dumps", "--save-debug-rollout-data"]),
        ({"load_debug_rollout_data": "one_dump"}, ["one_dump/1.jsonl, which is not there; set --num-rollout 1"]),
        ({"use_kl_loss": True, "ref_load": "nowhere"}, ["--ref-load nowhere: expected a Hugging Face model folder"]),
        ({"use_kl_loss": True, "ref_load": "no_weights"}, ["--ref-load no_weights: expected model.safetensors"]),
        ({"use_opd": True}, ["needs a teacher", "--opd-teacher-url or --opd-teacher-load"]),
        ({"opd_teacher_load": "model"}, ["--opd-teacher-load: grpo uses no teacher; set --use-opd too"]),
        ({"use_opd": True, "opd_teacher_load": "nowhere"}, ["--opd-teacher-load nowhere: expected a Hugging Face"]),
        ({"use_opd": True, "opd_teacher_load": "stranger"}, ["--opd-teacher-load stranger has another vocabulary"]),
        (
            {
                "use_opd": True,
                "opd_teacher_load": "odd",
                "pipeline_model_parallel_size": 2,
                "actor_num_gpus_per_node": 2,
            },
            ["--opd-teacher-load: --pipeline-model-parallel-size 2 does not divide the model's 3 layers"],
        ),
        ({"use_opd": True, "opd_teacher_load": "model", "opd_teacher_url": "x:1"}, ["leave one of them out"]),
        ({"use_opd": True, "opd_teacher_load": "model", "opd_type": "sglang"}, ["sglang needs --opd-teacher-url, not"]),
        (
            {"use_opd": True, "opd_teacher_url": "x:1", "rollout_temperature": 0.7},
            ["0.7 with", "at temperature 1 only"],
        ),
        (
            {"use_opd": True, "opd_teacher_url": "127.0.0.1:9"},
            ["--opd-teacher-url: cannot connect", "127.0.0.1:9", "correct the address"],
        ),
        ({"use_opd": True, "opd_teacher_load": "model", "loss_type": "sft_loss"}, ["no effect with sft_loss"]),
        ({"advantage_estimator": "ppo", "critic_load": "no_weights"}, ["--critic-load no_weights: expected model"]),
        ({"save": "prompts.jsonl"}, ["--save", "prompts.jsonl cannot be written", "choose another folder"]),
        ({"save_hf": "prompts.jsonl/{rollout_id}"}, ["--save-hf ", "prompts.jsonl/0 cannot be written"]),
        ({"tensor_model_parallel_size": 4, "actor_num_gpus_per_node": 4}, ["2 key-value heads", "1, 2"]),
        (
            {"env": "plugins.py:Ungraded", "rm_type": "gsm8k", "prompt_data": "objects.jsonl"},
            ["no label of the first 2 rows can be graded: gsm8k: the label must be", "got dict {'a': 1}"],
        ),
        ({"metrics_sinks": "nope.mod:to_csv"}, ["--metrics-sinks", "no module 'nope'"]),
        ({"metrics_sinks": "plugins.py:csv"}, ["--metrics-sinks", "no 'csv'"]),
        ({"global_batch_size": 3}, ["= 8 samples", "set --global-batch-size"]),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_starts(
    here: RunKit, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], parts: list[str]
) -> None:
    said = refused(["train", *here.arguments(**changes)], capsys)
    assert [part for part in parts if part not in said] == [], said


def test_packages_of_receivers_of_metrics_are_asked_for_before_anything_starts(
    here: RunKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.run.preflight.find_spec", lambda name: None)
    settings = RunSettings.from_cli(here.arguments(prometheus_port=9400, use_wandb=True))
    with pytest.raises(SettingsError) as raised:
        preflight(settings, "rollout")
    assert "--prometheus-port: prometheus_client is not installed; " in str(raised.value)
    assert "--use-wandb: wandb is not installed; " in str(raised.value)
    preflight(RunSettings.from_cli(here.arguments(eval_prompt_data="prompts.jsonl", prometheus_port=9400)), "eval")


def test_distillation_alone_needs_neither_a_grader_nor_groups(here: RunKit) -> None:
    changes: dict[str, Any] = {"advantage_estimator": "on_policy_distillation", "opd_teacher_load": "model"}
    changes |= {"env": "plugins.py:Ungraded", "n_samples_per_prompt": 1, "label_key": None}
    settings = RunSettings.from_cli(here.arguments(**changes))
    preflight(settings.check_complete("train"), "train")


@pytest.mark.parametrize("env", nightly([None, "agentrl:Environment"], 1))
def test_one_answer_a_prompt_needs_no_class(here: RunKit, env: str | None) -> None:
    settings = RunSettings.from_cli(here.arguments(env=env, rm_type="math", eval_prompt_data="prompts.jsonl"))
    for purpose in PURPOSES:
        preflight(settings.check_complete(purpose), purpose)


def test_a_grader_beside_a_reward_of_the_environments_own_is_noted(here: RunKit) -> None:
    noted = preflight(RunSettings.from_cli(here.arguments(rm_type="math")), "train")
    assert [note for note in noted if "AddEnv.reward decides" in note and "--rm-type math" in note]
    assert preflight(RunSettings.from_cli(here.arguments()), "train") == []


def test_a_label_that_nobody_reads_is_noted_once(here: RunKit) -> None:
    (note,) = preflight(RunSettings.from_cli(here.arguments(label_key=None)), "train")
    assert "field 'label' that no setting reads" in note
    assert "--label-key label" in note


@pytest.mark.parametrize("purpose", ["train", "eval"])
def test_slimes_defaults_take_no_text_for_a_message(here: RunKit, purpose: Purpose) -> None:
    one: dict[str, Any] = {"slime_defaults": True, "env": None, "rm_type": "math", "engine": "embedded"}
    one |= {"actor_num_gpus_per_node": 1, **({"eval_prompt_data": "prompts.jsonl"} if purpose == "eval" else {})}
    with pytest.raises(
        AgentRLError, match="prompts.jsonl line 1: a text is the prompt: add --apply-chat-template, or "
    ):
        preflight(RunSettings.from_cli(here.arguments(**one)), purpose)
    slimes = "slime.rollout.sglang_rollout.generate"
    passing: dict[str, Any] = {
        "apply_chat_template": True,
        "env": "env.py:AddEnv",
        "custom_generate_function_path": slimes,
    }
    for name, value in passing.items():
        preflight(RunSettings.from_cli(here.arguments(**{**one, name: value})), purpose)


def test_a_mistake_is_found_without_ray(here: RunKit, capsys: pytest.CaptureFixture[str]) -> None:
    refused(["train", *here.arguments(env="syntax.py:Env")], capsys)
    import ray

    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("command", "changes", "parts"),
    [
        ("rollout", {"env": "syntax.py:Env"}, ["SyntaxError"]),
        ("rollout", {"prompt_data": "broken.jsonl", "label_key": None}, ["broken.jsonl line 3"]),
        ("rollout", {"hf_checkpoint": "no_weights"}, ["no_weights: no weights in it", "model.safetensors"]),
        ("eval", {}, ["--eval-prompt-data NAME PATH is missing"]),
        ("eval", {"eval_prompt_data": "broken.jsonl", "label_key": None}, ["--eval-prompt-data broken", "line 3"]),
        ("eval", {"eval_prompt_data": "prompts.jsonl", "env": "plugins.py:Ungraded"}, ["nothing grades"]),
    ],
)
def test_commands_without_a_trainer_check_as_well(
    here: RunKit, capsys: pytest.CaptureFixture[str], command: str, changes: dict[str, Any], parts: list[str]
) -> None:
    said = refused([command, *here.arguments(**changes)], capsys)
    assert [part for part in parts if part not in said] == [], said


@pytest.mark.parametrize(
    ("sets", "part"),
    [
        (("dev", "prompts.jsonl", "test"), "--eval-prompt-data expects NAME PATH pairs, got dev prompts.jsonl test"),
        (("dev", "prompts.jsonl", "dev", "prompts.jsonl"), "--eval-prompt-data: each set needs its own name"),
    ],
)
def test_evaluation_sets_that_make_no_sense(
    here: RunKit, capsys: pytest.CaptureFixture[str], sets: tuple[str, ...], part: str
) -> None:
    assert part in refused(["eval", *here.arguments(), "--eval-prompt-data", *sets], capsys)


def test_an_external_engine_that_is_not_there(here: RunKit, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        address = f"127.0.0.1:{held.getsockname()[1]}"
        changes = {"engine": "external", "rollout_external_engine_addrs": address}
        for command in ("train", "rollout"):
            said = refused([command, *here.arguments(**changes)], capsys)
            assert f"no engine answers at http://{address}" in said
            assert "start the server first" in said


def test_a_port_that_is_taken(here: RunKit, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(["train", *here.arguments(engine_port_base=port)], capsys)
    assert f"port {port} on 127.0.0.1 is taken" in said
    assert "--engine-port-base" in said


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("place", "why"),
    [("prompts.jsonl/run", "Not a directory"), ("/proc/x", "cannot be made: /proc takes no new folder")],
)
def test_an_output_folder_that_cannot_be_made(
    here: RunKit, capsys: pytest.CaptureFixture[str], place: str, why: str, more: list[str]
) -> None:
    for command in ("train", "rollout"):
        said = refused([command, *here.arguments(place), *more], capsys)
        assert f"--output-dir {Path(place).absolute()}" in said
        assert f"{why}; choose another folder" in said


def test_a_folder_in_use_is_known_to_a_dry_run(
    here: RunKit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunFolder.open(str(tmp_path / "run"), "{}"):
        said = refused(["train", *here.arguments(str(tmp_path / "run")), "--dry-run"], capsys)
    assert "is in use by another agentrl process" in said


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_the_mistakes_of_all_layers_are_told_at_once(
    here: RunKit, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    (here.folder / "layers.yaml").write_text("lr: abc\nrollout_batchsize: 2\n")
    changes = {
        "env": "env.py:AddEnf",
        "rm_type": "mth",
        "custom_rm_path": "plugins.py:nothin",
        "hf_checkpoint": "modle",
    }
    given = ["train", *here.arguments(**changes), *more]
    parts = ["did you mean 'AddEnv'", "did you mean 'math'", "did you mean 'nothing'", "did you mean model?"]
    said = refused([*given, "--prompt-data", "none.jsonl"], capsys)
    assert [part for part in [*parts, "5 settings", "--prompt-data none.jsonl: no such file"] if part not in said] == []
    parts += ["unknown flag --lrr; did you mean --lr", "layers.yaml line 1", "layers.yaml line 2", "rollout_batch_size"]
    given = ["train", *here.arguments(**changes, lr=None), *more]
    said = refused([*given, "--lrr", "3", "--config", "layers.yaml"], capsys)
    assert [part for part in [*parts, "7 settings"] if part not in said] == [], said


def test_an_unknown_flag_is_not_followed_by_what_it_left_out(here: RunKit, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["train", "--hf-checkpoint", "model", "--promt-data", "prompts.jsonl", "--dry-run"], capsys)
    assert said.startswith("error: unknown flag --promt-data; did you mean --prompt-data?")
    assert "settings" not in said


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make models that trainers or engines refuse, complete except for the weights of `config.json`."""
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "plain")
    make_tiny_model(folder / "untied", tie_word_embeddings=False)
    make_tiny_model(folder / "grouped", "deepseek_v3")
    changes: dict[str, dict[str, Any]] = {
        "linear": {
            "model_type": "minimax",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "biased": {"attention_bias": True},
        "grouped": {"n_group": 2, "topk_group": 2, "num_experts_per_tok": 2},
    }
    for name, change in changes.items():
        if name != "grouped":
            shutil.copytree(folder / "plain", folder / name)
        config = folder / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    return folder


@pytest.mark.parametrize("more", nightly([[], ["--dry-run"]], [["--dry-run"]]))
@pytest.mark.parametrize(
    ("model", "backend", "said"),
    [
        ("linear", "fsdp", "linear cannot be trained with fsdp: samples are packed, and it has"),
        ("grouped", "megatron", "deepseek_v3 models with topk_group=2 cannot be trained with megatron yet"),
        ("biased", "megatron", "qwen3 models with attention_bias=True cannot be trained with megatron yet"),
        ("linear", "megatron", "config.json says 'minimax'"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_by_its_config(
    here: RunKit, models: Path, capsys: pytest.CaptureFixture[str], model: str, backend: str, said: str, more: list[str]
) -> None:
    changes: dict[str, Any] = {"hf_checkpoint": models / model, "train_backend": backend}
    assert said in refused(["train", *here.arguments(**changes), *more], capsys)


def test_a_model_that_the_engine_does_not_serve_is_refused_by_its_config(
    here: RunKit, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(["rollout", *here.arguments(hf_checkpoint=models / "linear"), "--dry-run"], capsys)
    assert "the embedded engine serves causal attention, its windows, gated delta nets" in said


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_critic_beside_untied_embeddings_passes(here: RunKit, models: Path, backend: str) -> None:
    changes: dict[str, Any] = {
        "hf_checkpoint": models / "untied",
        "train_backend": backend,
        "advantage_estimator": "ppo",
        "freeze_params_name_list": "lm_head" if backend == "fsdp" else "output_layer",
    }
    preflight(RunSettings.from_cli(here.arguments(**changes)).check_complete("train"), "train")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kl_loss_coef": 0.1}, "the expected gradient of k1 is zero"),
        (
            {"kl_loss_coef": 0.1, "kl_loss_type": "k2", "use_unbiased_kl": True},
            "k2's gradient is already unbiased",
        ),
        ({"kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"}, ""),
        ({"kl_loss_coef": 0.1, "use_unbiased_kl": True}, ""),
        ({"kl_loss_coef": 0.0}, ""),
    ],
)
def test_a_kl_loss_that_pulls_nowhere_is_refused(here: RunKit, changes: dict[str, Any], said: str) -> None:
    settings = RunSettings.from_cli(here.arguments(use_kl_loss=True, **changes))
    if said:
        with pytest.raises(SettingsError, match=said):
            settings.check_complete("train")
    else:
        settings.check_complete("train")


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        ({"max_staleness": 2, "use_rollout_logprobs": False}, True),
        ({"max_staleness": 2, "use_rollout_logprobs": False, "use_tis": True}, False),
        ({"max_staleness": 2}, False),
        ({"use_rollout_logprobs": False}, False),
    ],
)
def test_stale_training_without_a_correction_is_noted(here: RunKit, changes: dict[str, Any], noted: bool) -> None:
    flat = {name: value for name, value in changes.items() if value is not False}
    off = [f"--no-{name.replace('_', '-')}" for name, value in changes.items() if value is False]
    settings = RunSettings.from_cli([*here.arguments(**flat), *off]).check_complete("train")
    assert any("takes tokens of older weights" in note for note in preflight(settings, "train")) is noted


def test_the_overlong_buffer_is_of_the_whole_trajectory(here: RunKit, capsys: pytest.CaptureFixture[str]) -> None:
    shaped = here.arguments(overlong_buffer_len=4)
    said = refused(["train", *shaped, "--max-turns", "3", "--dry-run"], capsys)
    assert "--overlong-buffer-len 4: trajectories have up to 3 turns of" in said
    for enough in ("--max-turns 1", "--max-turns 3 --loss-max-length 96"):
        assert run(["train", *shaped, *enough.split(), "--dry-run"]) == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_rank": 4, "target_modules": "no_proj"}, "an adapter's target 'no_proj' is no linear layer"),
        ({"freeze_params_name_list": "nowhere"}, "--freeze-params-name-list nowhere: no parameter is called so"),
    ],
)
def test_names_of_layers_are_checked_before_anything_starts(
    here: RunKit, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    assert said in refused(["train", *here.arguments(train_backend="fsdp", **changes), "--dry-run"], capsys)


def test_the_phases_of_the_critics_schedule_must_fit_too(here: RunKit, capsys: pytest.CaptureFixture[str]) -> None:
    curve: dict[str, Any] = {
        "lr_decay_style": "WSD",
        "lr_wsd_decay_iters": 3,
        "num_rollout": 4,
        "advantage_estimator": "ppo",
    }
    assert run(["train", *here.arguments(**curve), "--dry-run"]) == 0
    said = refused(["train", *here.arguments(**curve, critic_lr_warmup_iters=2), "--dry-run"], capsys)
    assert "lr_wsd_decay_iters 3 and the warm-up of 2 steps must fit in the 4 steps" in said


def test_engines_and_trainer_have_the_same_weights_below_an_adapter(
    here: RunKit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("model", tmp_path / "tuned")
    loaded = here.arguments(train_backend="fsdp", load=str(tmp_path / "tuned"))
    said = refused(["train", *loaded, "--lora-rank", "4", "--dry-run"], capsys)
    assert "tuned: engines keep those weights of --hf-checkpoint model that do not learn" in said
    assert run(["train", *loaded, "--dry-run"]) == 0
    same = here.arguments(train_backend="fsdp", load="model", lora_rank=4)
    assert run(["train", *same, "--dry-run"]) == 0


def test_good_inputs_pass_and_none_of_the_users_code_is_called(here: RunKit) -> None:
    settings = RunSettings.from_cli(here.arguments(env="plugins.py:Early", eval_prompt_data="prompts.jsonl"))
    settings = settings.replace(save="saved", load="./saved")
    for purpose in PURPOSES:
        preflight(settings.check_complete(purpose), purpose)
    assert any(name.startswith("agentrl_plugin_plugins_") for name in sys.modules)


def test_calls_that_the_environment_reads_itself_need_no_parser(here: RunKit) -> None:
    changes = {"chat_template_path": "odd_calls.jinja", "tool_call_parser": "none"}
    preflight(RunSettings.from_cli(here.arguments(**changes)), "train")
    changes = {"chat_template_path": "odd_calls.jinja", "env": "plugins.py:Paid"}  # it has no tools
    preflight(RunSettings.from_cli(here.arguments(**changes)), "train")


def test_a_resumed_run_needs_the_later_dumps_only(here: RunKit, tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"{number}.jsonl").write_text("")
    preflight(RunSettings.from_cli(here.arguments(load_debug_rollout_data=tmp_path)), "train")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"advantage_estimator": "ppo"}, "rollout_000000: it holds no critic, and this run's algorithm learns one"),
        (
            {"lr_decay_style": "cosine", "num_rollout": 8},
            "changes until optimizer step 2, this run's until step 8",
        ),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_checkpoint_that_does_not_fit_is_known_to_a_dry_run_too(
    here: RunKit,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    words: str,
    more: list[str],
) -> None:
    (tmp_path / "rollout_000000").mkdir()
    manifest = {
        "format": FORMAT,
        "step": 0,
        "stepped": True,
        "layout": {},
        "model": {},
        "optimizer": {},
        "lr_decay_end": 2,
    }
    (tmp_path / "rollout_000000" / MANIFEST).write_text(json.dumps(manifest))
    assert run(["train", *here.arguments(save=tmp_path, **changes), *more]) == 2
    assert words in capsys.readouterr().err


def test_prompts_may_name_their_own_grader(here: RunKit, tmp_path: Path) -> None:
    preflight(RunSettings.from_cli(here.arguments(env="plugins.py:Paid")), "train")  # its steps do
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"input": "a", "label": "b", "metadata": {"rm_type": "f1"}}) + "\n")
    preflight(RunSettings.from_cli(here.arguments(env="plugins.py:Ungraded", prompt_data=file)), "train")
