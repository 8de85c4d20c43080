"""The dry run on `config.json` files of published models, by trainer; slime's scripts with their models' shapes."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from agentrl.cli.main import run
from agentrl.config import RunSettings
from agentrl.config.inapplicable import possibly_inapplicable
from agentrl.errors import AgentRLError, SettingsError
from agentrl.run.training import make_backend
from agentrl.train.contracts import RankInfo
from tests.compat.test_launch_scripts import HERE, argv
from tests.support.embedded_server import embedded_server
from tests.support.real_shapes import real_folder, real_shapes
from tests.support.tiny_models import make_tiny_model

NO_FAMILY, IMAGES = "expected a model_type among", "has parts for more than text"
SEES = "models see images; megatron trains text models alone"
STATES, UNKNOWN = "samples are packed, and it has layers", "transformers makes no causal language model of it"
REFUSED = {
    "Qwen3.5-27B": (SEES, ""),
    "Qwen3.5-35B-A3B": (SEES, ""),
    "MiMo-7B-Base": ("", UNKNOWN),
    "DeepSeek-V3.2": (NO_FAMILY, STATES),
    "gemma-4-26B-A4B": (NO_FAMILY, IMAGES),
    "Llama-4-Scout-17B-16E-Instruct": (NO_FAMILY, IMAGES),
    "Mixtral-8x7B-v0.1": (NO_FAMILY, ""),
    "Kimi-K2-Instruct": ("", UNKNOWN),
    "Kimi-K2-Thinking": ("", UNKNOWN),
    "Kimi-K2.5": (NO_FAMILY, IMAGES),
    "gpt-oss-20b": (NO_FAMILY, "is quantised"),
    "GLM-5": (NO_FAMILY, STATES),
    "MiniMax-M2.5": (NO_FAMILY, ""),
    "Qwen3-Next-80B-A3B": (NO_FAMILY, ""),
    "gemma-3-1b-it": (NO_FAMILY, ""),
}
"""Messages of Megatron and FSDP2 for a model that one of them does not train; empty if it does."""
TRAINED = [
    *("Qwen2.5-0.5B-Instruct", "Qwen3-8B", "Qwen3-30B-A3B", "GLM-4-9B-0414", "GLM-4.7", "GLM-4.7-Flash", "DeepSeek-V3"),
    *("Moonlight-16B-A3B", "Meta-Llama-3.1-8B", "Mistral-7B-v0.3"),
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("name", [*REFUSED, *TRAINED])
def test_the_dry_run_says_what_the_run_says(
    name: str, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": "1+1?", "label": "2"}) + "\n")
    folder = real_folder(tmp_path / "model", name, float8=False)
    line = (
        f"--hf-checkpoint {folder} --prompt-data {tmp_path}/rows.jsonl --label-key label --rm-type math --engine sglang"
    )
    line += f" --engine-python {sys.executable} --train-backend {backend} --output-dir {tmp_path}/out"
    refused = REFUSED.get(name, ("", ""))[backend == "fsdp"]
    assert run(["train", "--dry-run", *line.split()]) == (2 if refused else 0)
    said = capsys.readouterr().err
    assert refused in said
    if refused:
        with pytest.raises(AgentRLError, match=refused):  # the run, which builds the model after its engines are up
            make_backend(RunSettings.from_cli(line.split())).init(RankInfo())


def test_float8_weights_are_refused_with_the_command_that_converts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = real_folder(tmp_path / "model", "Qwen3-30B-A3B-FP8")
    assert run(["rollout", "--dry-run", "--hf-checkpoint", str(folder), "--output-dir", str(tmp_path / "out")]) == 2
    assert f"`agentrl convert {folder} DIR --to hf`, which writes it without" in capsys.readouterr().err


def test_rollouts_are_not_refused_by_rules_of_trainers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": "1+1?", "label": "2"}) + "\n")
    folder = real_folder(tmp_path / "model", "Qwen3-0.6B")
    line = f"--hf-checkpoint {folder} --prompt-data {tmp_path}/rows.jsonl --label-key label --rm-type math --slime-defaults --apply-chat-template"
    line += f" --engine-python {sys.executable} --output-dir {tmp_path}/out --num-rollout 1 --rollout-batch-size 4"
    line += " --actor-num-nodes 4 --rollout-num-gpus 1 --tensor-model-parallel-size 3 --expert-model-parallel-size 2"
    assert run(["train", "--dry-run", *line.split()]) == 2
    assert "--expert-model-parallel-size 2: the model's config.json has no experts" in capsys.readouterr().err
    assert run(["rollout", "--dry-run", *line.split()]) == 0


def test_every_shape_says_where_it_is_from() -> None:
    file = Path(__file__).parents[1] / "support" / "shapes" / "config_shapes.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(row["source"].startswith(("github:", "written from documentation: ")) for row in rows)
    assert len({row["config"]["model_type"] for row in rows}) >= 20
    assert {*REFUSED, *TRAINED} <= real_shapes().keys()


SHAPES = {
    "multi_task": "Qwen3-4B",
    "retool_qwen3_4b_rl": "Qwen3-4B-Instruct-2507",
    "retool_qwen3_4b_sft": "Qwen3-4B-Instruct-2507",
    "rollout_buffer_example": "Qwen2.5-3B",
    "run-deepseek-r1": "DeepSeek-R1",
    "run-glm4-9B": "GLM-4-9B-0414",
    "run-glm4.7-30B-A3B": "GLM-4.7-Flash",
    "run-glm4.7-30B-A3B-delta": "GLM-4.7-Flash",
    "run-glm4.7-355B-A32B": "GLM-4.7",
    "run-glm5-744B-A40B": "GLM-5",
    "run-glm5.2-744B-A40B": "GLM-5.2-FP8",
    "run-kimi-k2-Instruct": "Kimi-K2-Instruct",
    "run-kimi-k2-Thinking": "Kimi-K2-Thinking",
    "run-kimi-k2-Thinking-int4": "Kimi-K2-Thinking",
    "run-mimo-7B-rl-eagle": "MiMo-7B-RL",
    "run-minimax-m2": "MiniMax-M2.5",
    "run-moonlight-16B-A3B": "Moonlight-16B-A3B",
    "run-moonlight-16B-A3B-int4": "Moonlight-16B-A3B",
    "run-qwen2.5-0.5B-fully_async": "Qwen2.5-0.5B-Instruct",
    "run-qwen2.5-0.5B-gb10-smoke": "Qwen2.5-0.5B-Instruct",
    "run-qwen2.5-0.5B-reproducibility": "Qwen2.5-0.5B-Instruct",
    "run-qwen3-235B-A22B": "Qwen3-235B-A22B",
    "run-qwen3-235B-A22B-int4": "Qwen3-235B-A22B",
    "run-qwen3-235B-A22B-sft": "Qwen3-235B-A22B",
    "run-qwen3-30B-A3B": "Qwen3-30B-A3B",
    "run-qwen3-30B-A3B-int4": "Qwen3-30B-A3B",
    "run-qwen3-30B-A3B-multi-agent": "Qwen3-30B-A3B",
    "run-qwen3-30b-a3b-fp8": "Qwen3-30B-A3B",
    "run-qwen3-32B": "Qwen3-32B",
    "run-qwen3-4B": "Qwen3-4B",
    "run-qwen3-4B-amd": "Qwen3-4B",
    "run-qwen3-4B-base-sft": "Qwen3-4B",
    "run-qwen3-4b-fp8": "Qwen3-4B",
    "run-qwen3-4b-mis": "Qwen3-4B",
    "run-qwen3-8B-opd": "Qwen3-8B",
    "run-qwen3-8B-opd-megatron": "Qwen3-8B",
    "run-qwen3-next-80B-A3B": "Qwen3-Next-80B-A3B",
    "run-qwen3.5-27B": "Qwen3.5-27B",
    "run-qwen3.5-35B-A3B-sft": "Qwen3.5-35B-A3B",
    "run-qwen3.5-9B-fully_async": "Qwen3.5-9B",
    "run_geo3k_qwen35": "Qwen3.5-35B-A3B",
    "run_qwen2.5_3B": "Qwen2.5-3B",
    "run_qwen36_35b_a3b_swe_8nodes": "Qwen3.5-35B-A3B",
    "run_qwen3_4B": "Qwen3-4B-Instruct-2507",
    "strands_qwen3_8b": "Qwen3-8B",
    "test_gspo": "Qwen3-0.6B",
}
WORLDS = {
    "run-qwen3-8B-opd": "a teacher that answers",
    "strands_qwen3_8b": "the package strands",
    "run_qwen3_4B": "the package tau_bench",
}
"""Scripts that pass if an outside service exists; a server and functions replace it here."""
UNTRAINED = {
    "rollout_buffer_example": "--rollout-buffer-url: there is no server of trajectories",
    "run-glm4.7-30B-A3B": "8 trainer processes are no multiple of expert 8 x expert tensor 1 x pipeline 2 = 16",
    "run-glm4.7-30B-A3B-delta": "--pipeline-model-parallel-size 2 does not divide the model's 47 layers",
    "run-glm5-744B-A40B": "--allgather-cp: models with linear or sparse attention are not trained here",
    "run-glm5.2-744B-A40B": "--allgather-cp: models with linear or sparse attention are not trained here",
    "run-kimi-k2-Instruct": "--global-batch-size 16 gives 256 data-parallel ranks",
    "run-qwen3-30b-a3b-fp8": "--fp8-format",
}
"""Scripts that are refused, and a reason. Megatron too refuses the layouts of both 30B and of Instruct."""


def test_no_script_is_left_out() -> None:
    assert SHAPES.keys() == {path.stem for path in HERE.glob("*.txt")}
    assert len(SHAPES) - len(WORLDS) - len(UNTRAINED) == 36


@pytest.mark.slow
@pytest.mark.parametrize("script", SHAPES)
def test_scripts_with_the_shape_of_their_model(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    line = argv(script, tmp_path)
    real_folder(tmp_path / "model", SHAPES[script], float8=False)
    with ExitStack() as stack:
        if "--rm-url" in line:
            teacher = make_tiny_model(tmp_path / "teacher", context_length=140000)
            line[line.index("--rm-url") + 1] = f"{stack.enter_context(embedded_server(teacher))}/generate"
        code = run(["train", "--dry-run", *line])
    refused = UNTRAINED.get(script, "")
    assert (code, refused in capsys.readouterr().err) == (2 if refused else 0, True)


def test_a_model_that_fsdp_alone_trains_is_given_to_it_and_its_layout_named(tmp_path: Path) -> None:
    line = argv("run-qwen3.5-27B", tmp_path)
    real_folder(tmp_path / "model", "Qwen3.5-27B")
    settings = RunSettings.from_cli(line).check_complete("train")
    assert (settings.train.train_backend, settings.train.model_parallel_size) == ("fsdp", 1)
    said = [note for note in possibly_inapplicable(settings, "train") if "--train-backend fsdp" in note]
    assert len(said) == 1
    assert "--tensor-model-parallel-size" in said[0]
    with pytest.raises(SettingsError, match="--tensor-model-parallel-size .* no effect with --train-backend fsdp"):
        settings.replace(slime_defaults=False, compat_options={}).check_complete("train")
    real_folder(tmp_path / "model", "Qwen3-0.6B")
    kept = RunSettings.from_flat({"hf_checkpoint": str(tmp_path / "model")})
    assert kept.train.train_backend == "megatron"


def test_a_script_for_images_trains_weights_for_them_and_its_megatron_means_any_backend(tmp_path: Path) -> None:
    line = argv("run_geo3k_qwen35", tmp_path)
    folder = real_folder(tmp_path / "model", "Qwen3.5-35B-A3B")
    settings = RunSettings.from_cli(line).check_complete("train")
    assert (settings.train.train_backend, settings.train.train_vision, settings.data.image_key) == (
        "fsdp",
        True,
        "images",
    )
    assert not RunSettings.from_cli([*line, "--no-train-vision"]).train.train_vision
    own = RunSettings.from_flat({"hf_checkpoint": str(folder), "train_backend": "megatron"})
    assert own.train.train_backend == "megatron"
