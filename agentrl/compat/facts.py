"""True values of Megatron's flags about a model's shape and a run, from `config.json` and our settings."""

import os.path
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentrl.config.fields import Sections
from agentrl.files import read_table
from agentrl.modelfolder import EXPERTS, read_config, text_config

Config = Mapping[str, Any]
Fact = Callable[[Config, Any], Any]  # maps config.json and the given value to the true value


def _head(config: Config) -> Any:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _rope(config: Config, name: str) -> Any:
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}.get(name, config.get(name))


def _spec(config: Config, given: str) -> str:
    """Check slime's module for a model family that Megatron's arguments cannot describe; _vl means with images."""
    package, _, module = given.split()[0].rpartition(".")
    fits = package == "slime_plugins.models" and config["model_type"].startswith(module.removesuffix("_vl"))
    return given if fits else "of config.json"


_GATED = ("qwen3_next", "qwen3_5")
_QWEN = ("qwen", "qwen3", "qwen3_5")
_SIGMOID = ("minimax_m2", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "kimi_k2")


def _sparse(config: Config, given: Any) -> Any:
    """Compare Megatron's pattern of sparse layers: a period, or an expression like `[0]*3+[1]*58`."""
    skipped, every = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step") or 1
    first, layers = config.get("first_k_dense_replace") or 0, range(config["num_hidden_layers"])
    found = [int(i >= first and (i + 1) % every == 0 and i not in skipped) for i in layers]
    parts = re.findall(r"\[([01])\](?:\*(\d+))?", "".join(str(given).split()))
    said = [int(kind) for kind, times in parts for _ in range(int(times or 1))]
    if isinstance(given, int):
        said = [int(i % given == 0) for i in layers]
    return given if found in (said, given) else found


SHAPES: Mapping[str, Fact] = {
    **{name: lambda c, _, key=key: c[key] for name, key in read_table(__file__, "shapes.tsv")},  # type: ignore[misc]
    "ffn_hidden_size": lambda c, given: c.get("intermediate_size") or given,  # if missing, all layers have experts
    "num_query_groups": lambda c, _: c.get("num_key_value_heads") or c["num_attention_heads"],
    "group_query_attention": lambda c, _: (
        c.get("num_key_value_heads", c["num_attention_heads"]) < c["num_attention_heads"]
    ),
    "kv_channels": lambda c, given: given if c.get("kv_lora_rank") else _head(c),
    "make_vocab_size_divisible_by": lambda c, given: given if c["vocab_size"] % given == 0 else 1,
    "seq_length": lambda c, given: min(given, c["max_position_embeddings"]),
    "normalization": lambda c, _: "RMSNorm",
    "swiglu": lambda c, _: c.get("hidden_act", "silu") == "silu",
    "untie_embeddings_and_output_weights": lambda c, _: not c.get("tie_word_embeddings", False),
    "disable_bias_linear": lambda c, _: not c.get("mlp_bias", False),
    # Multi-latent attention does not read the flag.
    "add_qkv_bias": lambda c, given: (
        given if c.get("kv_lora_rank") else c["model_type"].startswith("qwen2") or bool(c.get("attention_bias"))
    ),
    "qk_layernorm": lambda c, _: (
        c["model_type"].startswith("qwen3") or bool(c.get("kv_lora_rank") or c.get("use_qk_norm"))
    ),
    **dict.fromkeys(
        ("use_gated_attention", "attention_output_gate", "apply_layernorm_1p"),
        lambda c, _: c["model_type"].startswith(_GATED),
    ),
    **dict.fromkeys(("post_self_attn_layernorm", "post_mlp_layernorm"), lambda c, _: c["model_type"] == "glm4"),
    "rotary_interleaved": lambda c, _: c["model_type"] in ("glm", "glm4"),
    "spec": _spec,
    "multi_latent_attention": lambda c, _: bool(c.get("kv_lora_rank")),
    "mscale": lambda c, given: _rope(c, "mscale") if _rope(c, "factor") else given,
    "mscale_all_dim": lambda c, given: _rope(c, "mscale_all_dim") if _rope(c, "factor") else given,
    "rotary_base": lambda c, _: _rope(c, "rope_theta") or 10000.0,
    "rotary_percent": lambda c, _: _rope(c, "partial_rotary_factor") or c.get("rotary_dim", _head(c)) / _head(c),
    "rotary_scaling_factor": lambda c, _: _rope(c, "factor") or 1.0,
    "use_rope_scaling": lambda c, _: (_rope(c, "rope_type") or "default") != "default",
    "num_experts": lambda c, _: next((c[key] for key in EXPERTS if c.get(key)), None),
    "moe_ffn_hidden_size": lambda c, _: c.get("moe_intermediate_size") or c["intermediate_size"],
    "moe_layer_freq": _sparse,
    "moe_shared_expert_intermediate_size": lambda c, _: (
        c.get("shared_expert_intermediate_size")
        or (c.get("n_shared_experts") or 0) * c["moe_intermediate_size"]
        or None
    ),
    "moe_shared_expert_gate": lambda c, _: c["model_type"].startswith(("qwen2_moe", *_GATED)),
    "moe_router_score_function": lambda c, _: "sigmoid" if c["model_type"] in _SIGMOID else "softmax",
    "moe_router_enable_expert_bias": lambda c, _: c["model_type"] in _SIGMOID,
    "moe_router_pre_softmax": lambda c, given: given if c["model_type"] in _SIGMOID else not c.get("norm_topk_prob"),
    "moe_router_topk_scaling_factor": lambda c, _: c.get("routed_scaling_factor", 1.0),
    "moe_router_num_groups": lambda c, _: c.get("n_group") or 1,
    "moe_router_group_topk": lambda c, _: c.get("topk_group") or 1,
    "model_name": lambda c, given: given if c["model_type"] in given.lower() else c["model_type"],
    "loss_mask_type": lambda c, given: given if "qwen" in c["model_type"] and given in _QWEN else "the template's",
}
"""Facts by the flag's name. They raise KeyError if config.json lacks the value."""

RUNS: Mapping[str, Callable[[Sections], Any]] = {
    "debug_train_only": lambda s: bool(s.cluster.load_debug_rollout_data or s.data.sft_turns),
    "disable_compute_advantages_and_returns": lambda s: s.algorithm.supervised,
    "use_critic": lambda s: "values" in s.algorithm.reads,
    "log_probs_max_tokens_per_gpu": lambda s: s.train.max_tokens_per_gpu,
}


def facts(settings: Sections, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the true values of the names in `given`; None or no entry if unknown."""
    found: dict[str, Any] = {name: RUNS[name](settings) for name in given if name in RUNS}
    folder = Path(os.path.expanduser(settings.train.hf_checkpoint or ""))
    if not os.path.isfile(folder / "config.json"):  # unlike `Path.is_file`, this is False for a name that is too long
        return found
    config = text_config(read_config(folder))
    for name, value in given.items():
        if name in SHAPES:
            try:
                found[name] = SHAPES[name](config, value)
            except (KeyError, TypeError, AttributeError, ArithmeticError):
                found[name] = None
    return found
