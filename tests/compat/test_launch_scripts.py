"""slime's 46 launch scripts (flags in `scripts/`), with tiny paths for model, reference, data, functions and files.
Settings are valid if a tiny model can have the shape in the flags; dense scripts are also tested with a Llama's
shape. Each other script reports why it cannot run. `test_real_shapes` uses the shape of the real model."""

import json
import shlex
import struct
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import run
from agentrl.config import RunSettings
from agentrl.errors import SettingsError
from agentrl.media import Image
from tests.support.embedded_server import embedded_server
from tests.support.tiny_models import Arch, make_tiny_model
from tests.support.vision import picture

HERE = Path(__file__).parent / "scripts"
LLAMA = (HERE / "llama3.2-3B.args").read_text().splitlines()
SHAPES = {line.split()[0] for line in LLAMA} | {
    "--qk-layernorm",
    "--add-qkv-bias",
    "--untie-embeddings-and-output-weights",
    *("--spec", "--post-self-attn-layernorm", "--post-mlp-layernorm", "--rotary-interleaved", "--rotary-percent"),
}

PASS = [
    "multi_task",
    "retool_qwen3_4b_rl",
    "retool_qwen3_4b_sft",
    "run-glm4-9B",
    "run-qwen2.5-0.5B-fully_async",
    "run-qwen2.5-0.5B-gb10-smoke",
    "run-qwen2.5-0.5B-reproducibility",
    "run-qwen3-32B",
    "run-qwen3-4B",
    "run-qwen3-4B-amd",
    "run-qwen3-4B-base-sft",
    "run-qwen3-4b-fp8",
    "run-qwen3-4b-mis",
    "run-qwen3-8B-opd",
    "run_qwen2.5_3B",
    "run_qwen3_4B",
    "strands_qwen3_8b",
]
MIXTURES = [
    "run-deepseek-r1",
    "run-glm4.7-355B-A32B",
    "run-kimi-k2-Thinking",
    "run-kimi-k2-Thinking-int4",
    "run-moonlight-16B-A3B",
    "run-moonlight-16B-A3B-int4",
    "run-qwen3-235B-A22B",
    "run-qwen3-235B-A22B-int4",
    "run-qwen3-235B-A22B-sft",
    "run-qwen3-30B-A3B",
    "run-qwen3-30B-A3B-int4",
    "run-qwen3-30B-A3B-multi-agent",
]
"""Scripts for mixtures of experts."""
REASONS = {
    "--use-gated-attention": "models are built from config.json",
    "--rollout-buffer-url": "there is no server of trajectories",
    "--fp8-format": "models are trained in bfloat16 or float32",
    "--allgather-cp": "models with linear or sparse attention are not trained here",
    "--spec": "models are built from config.json",
}
UNLABELLED = "run-qwen3-8B-opd-megatron"
"""It has --rm-type math without --label-key: the reward is 0 in slime, and here too."""
UNSPOKEN = ("run-glm4.7-30B-A3B", "run-glm4.7-30B-A3B-delta", "run-mimo-7B-rl-eagle", "test_gspo")
"""Megatron too refuses the layout of the first two. No tiny model has the shape of the others: `test_real_shapes`."""
CUT = "run-kimi-k2-Instruct"
"""Its command ends after a line without a backslash, in bash too."""


def claimed(lines: list[str]) -> dict[str, str]:
    return {flag: value for flag, _, value in (line.partition(" ") for line in lines)}


def model(folder: Path, lines: list[str], *, whole: bool) -> Path:
    """Make a folder whose config.json has the shape in the flags; its weights are a sparse file of the right size."""
    said = claimed(lines)
    kind: Arch = (
        "glm4"
        if "--post-mlp-layernorm" in said
        else "qwen3"
        if "--qk-layernorm" in said
        else "qwen2"
        if "--add-qkv-bias" in said
        else "llama"
    )
    if whole:
        make_tiny_model(folder, kind)
    folder.mkdir(exist_ok=True)
    config: dict[str, Any] = {
        "model_type": kind,
        "num_hidden_layers": int(said.get("--num-layers", 2)),
        "hidden_size": int(said.get("--hidden-size", 64)),
        "intermediate_size": int(said.get("--ffn-hidden-size", 128)),
        "num_attention_heads": int(said.get("--num-attention-heads", 4)),
        "num_key_value_heads": int(said.get("--num-query-groups", said.get("--num-attention-heads", 4))),
        "vocab_size": int(said.get("--vocab-size", 512)),
        "rms_norm_eps": float(said.get("--norm-epsilon", 1e-5)),
        "rope_theta": float(said.get("--rotary-base", 1e4)),
        "max_position_embeddings": int(said.get("--max-position-embeddings", 40960)),
        "tie_word_embeddings": "--untie-embeddings-and-output-weights" not in said,
    }
    if "--kv-channels" in said:
        config["head_dim"] = int(said["--kv-channels"])
    config |= _experts(said)
    if kind == "glm4":
        config |= {"attention_bias": "--add-qkv-bias" in said, "partial_rotary_factor": float(said["--rotary-percent"])}
    if "--use-rope-scaling" in said:
        bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        config["rope_scaling"] = {"rope_type": "llama3", "factor": float(said["--rotary-scaling-factor"]), **bands}
    (folder / "config.json").write_text(json.dumps(config))
    rows, width = config["vocab_size"] // 8 + 1, config["hidden_size"]
    header: dict[str, Any] = {"embed": {"dtype": "U8", "shape": [rows, width], "data_offsets": [0, rows * width]}}
    for layer in range(config["num_hidden_layers"]):
        at = rows * width + layer
        header[f"layer.{layer}"] = {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + rows * width + len(header) - 1)
    return folder


def _experts(said: dict[str, str]) -> dict[str, Any]:
    """Return the config.json entries of a mixture of experts, empty for a dense model."""
    if "--num-experts" not in said:
        return {}
    experts, ffn = int(said["--num-experts"]), int(said["--moe-ffn-hidden-size"])
    common: dict[str, Any] = {
        "moe_intermediate_size": ffn,
        "num_experts_per_tok": int(said["--moe-router-topk"]),
        "norm_topk_prob": True,
    }
    if said["--moe-router-score-function"] == "softmax":
        return {**common, "model_type": "qwen3_moe", "num_experts": experts, "decoder_sparse_step": 1}
    common |= {
        "n_routed_experts": experts,
        "n_shared_experts": int(said.get("--moe-shared-expert-intermediate-size", 0)) // ffn,
        "n_group": int(said.get("--moe-router-num-groups", 1)),
        "topk_group": int(said.get("--moe-router-group-topk", 1)),
        "routed_scaling_factor": float(said.get("--moe-router-topk-scaling-factor", 1)),
        "first_k_dense_replace": int(DENSE.get(said["--num-layers"], 1)),
    }
    if "--multi-latent-attention" not in said:
        turned = {"partial_rotary_factor": float(said["--rotary-percent"]), "attention_bias": "--add-qkv-bias" in said}
        return {**common, **turned, "model_type": "glm4_moe", "use_qk_norm": "--qk-layernorm" in said}
    heads = {
        "kv_lora_rank": "kv-lora-rank",
        "qk_nope_head_dim": "qk-head-dim",
        "qk_rope_head_dim": "qk-pos-emb-head-dim",
    }
    latent: dict[str, Any] = {
        name: int(said[f"--{flag}"]) for name, flag in {**heads, "v_head_dim": "v-head-dim"}.items()
    }
    latent["q_lora_rank"] = int(said["--q-lora-rank"]) if "--q-lora-rank" in said else None
    factor = float(said.get("--rotary-scaling-factor", 1))
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 4096}
    scaled = {"rope_scaling": {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}} if factor != 1 else {}
    return {**common, **latent, **scaled, "model_type": "deepseek_v3"}


DENSE = {"61": 3, "92": 3}
"""Number of dense layers at the beginning of models, by their number of layers, if it is not 1."""


def argv(name: str, folder: Path, *, shape: list[str] | None = None, whole: bool = False) -> list[str]:
    """Return the script's command line with tiny paths."""
    title, *lines = (HERE / f"{name}.txt").read_text().splitlines()
    if shape is not None:
        lines = [*shape, *(line for line in lines if line.split()[0] not in SHAPES)]
    start, said = str(model(folder / "model", lines, whole=whole)), claimed(lines)
    row: dict[str, Any] = {
        "prompt": "1+1?",
        "label": "2",
        "index": "Hello",
        "reward_model": {"ground_truth": "2"},
        **dict.fromkeys(("question", "problem"), "1+1?"),
    }
    if "--multimodal-keys" in said:
        row |= {"answer": "2", "images": [Image.from_bytes(picture(32, 32)).url]}
    taught = "sft_rollout" in "".join(lines)
    row["messages"] = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}][: 1 + taught]
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 128)
    (folder / "f.py").write_text(
        "async def f(args, sample, *params): ...\nasync def rm(args, sample): ...\ndef tis(*all, **named): ...\n"
    )
    (folder / "eval.yaml").write_text(f"eval:\n  datasets:\n    - name: a\n      path: {folder}/rows.jsonl\n")
    (folder / "own.yaml").write_text("use_tis: true\ntis_mode: clip\ntis_upper_bound: 2.0\n")
    put = {
        **dict.fromkeys(("--hf-checkpoint", "--ref-load", "--opd-teacher-load"), start),
        **dict.fromkeys(("--load", "--save"), f"{folder}/save"),
        "--prompt-data": f"{folder}/rows.jsonl",
        "--eval-config": f"{folder}/eval.yaml",
        "--custom-config-path": f"{folder}/own.yaml",
        "--custom-generate-function-path": f"{folder}/f.py:f",
        "--custom-tis-function-path": f"{folder}/f.py:tis",
    }
    if "--load" in said and said["--load"] == said.get("--hf-checkpoint"):
        put["--load"] = start
    out = ["--slime-defaults", "--output-dir", f"{folder}/out", "--engine-python", sys.executable]
    if title.endswith("train_async.py") and not taught:
        out.append("--train-async")
    for line in lines:
        flag, *values = shlex.split(line)
        if values == ["?"]:
            continue  # `printf` sets it; `read_script` leaves it out with a note
        if flag == "--eval-prompt-data":
            values = [f"{folder}/rows.jsonl" if value.startswith("/") or value == "?" else value for value in values]
        elif flag == "--custom-rm-path" and not values[0].startswith("slime."):
            values = [f"{folder}/f.py:rm"]
        out += [flag, *([put[flag]] if flag in put else values)]
    return out


def test_all_scripts_are_spoken_of() -> None:
    names = {path.stem for path in HERE.glob("*.txt")}
    assert len(names) == 46
    assert {*PASS, *MIXTURES, UNLABELLED, CUT} <= names
    for name in sorted(names - {*PASS, *MIXTURES, *UNSPOKEN, UNLABELLED, CUT}):
        assert claimed((HERE / f"{name}.txt").read_text().splitlines()).keys() & REASONS.keys(), name


@pytest.mark.parametrize("name", [*PASS, *MIXTURES, UNLABELLED])
def test_settings_of_scripts_hold_together(name: str, tmp_path: Path) -> None:
    settings = RunSettings.from_cli(argv(name, tmp_path))
    assert settings.check_complete("train") is settings
    said = claimed((HERE / f"{name}.txt").read_text().splitlines())
    assert settings.train.lr == float(said["--lr"])
    assert str(settings.args.num_layers) == said["--num-layers"]
    assert settings.engine.engine == "sglang"


@pytest.mark.parametrize(
    "name",
    sorted(path.stem for path in HERE.glob("*.txt") if path.stem not in (*PASS, *MIXTURES, *UNSPOKEN, UNLABELLED)),
)
def test_each_of_the_others_names_its_reason(name: str, tmp_path: Path) -> None:
    line = argv(name, tmp_path)
    expected = "--global-batch-size 16 gives 256" if name == CUT else next(REASONS[f] for f in REASONS if f in line)
    with pytest.raises(SettingsError, match=expected):
        RunSettings.from_cli(line)


def test_another_shape_than_the_models_is_refused_with_both_values(tmp_path: Path) -> None:
    line = argv("run-qwen3-4B", tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 28, "rope_theta": 1e4}))
    with pytest.raises(SettingsError) as caught:
        RunSettings.from_cli(line)
    assert "--num-layers 36: it is 28 here" in str(caught.value)
    assert "--rotary-base 1000000: it is 10000.0 here" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, None) for name in (*PASS, *MIXTURES)), *((name, LLAMA) for name in PASS)],
    ids=lambda value: "llama" if isinstance(value, list) else None,
)
def test_scripts_pass_the_dry_run(
    name: str,
    shape: list[str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    line = argv(name, tmp_path, shape=shape, whole=True)
    with ExitStack() as stack:
        if "--rm-url" in line:
            teacher = make_tiny_model(tmp_path / "teacher", context_length=140000)
            line[line.index("--rm-url") + 1] = f"{stack.enter_context(embedded_server(teacher))}/generate"
        assert run(["train", "--dry-run", *line]) == 0
    said = capsys.readouterr()
    assert "All checks that precede a run have passed." in said.out
    if name in MIXTURES:
        assert "--moe-token-dispatcher-type" in said.out + said.err
        assert "they choose kernels, overlap or memory, and change no result" in said.out + said.err


@pytest.mark.slow
def test_a_script_without_labels_is_rewarded_with_0_as_in_slime(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "--dry-run", *argv(UNLABELLED, tmp_path, whole=True)]) == 0
    assert "compares with a label, and the prompts have none: every reward is 0, as in slime" in capsys.readouterr().err
