"""The families: shared rules for the parts of a layer, and the rules of each model type."""

from dataclasses import replace

from agentrl.train.megatron.families.base import ModelFamily, Rule, ShardLayout

HF, MEGATRON = "model.layers.{}.", "decoder.layers.{}."


def rule(megatron: str, hf: str, layout: ShardLayout = ShardLayout.WHOLE, when: str = "") -> Rule:
    """Return a layer's rule; `hf` names one tensor, or several with spaces between."""
    return Rule(MEGATRON + megatron, tuple(HF + name for name in hf.split()), layout, when)


def _named(names: str, kind: str) -> str:
    return " ".join(f"self_attn.{name}_proj.{kind}" for name in names.split())


_NAMES = {"input": "input", "pre_mlp": "post_attention"}
NORMS = tuple(rule(f"{name}_layernorm.weight", f"{hf}_layernorm.weight") for name, hf in _NAMES.items())
AFTER = tuple(rule(f"{name}.weight", f"{name}.weight") for name in ("post_self_attn_layernorm", "post_mlp_layernorm"))
"""Norms of the outputs of attention and MLP, before the residual addition."""
ATTENTION = (
    rule("self_attention.linear_qkv.weight", _named("q k v", "weight"), ShardLayout.QKV),
    rule("self_attention.linear_proj.weight", _named("o", "weight"), ShardLayout.COLUMNS),
)
QK_NORM = tuple(rule(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight") for x in "qk")
MLP = (
    rule("mlp.linear_fc1.weight", "mlp.gate_proj.weight mlp.up_proj.weight", ShardLayout.GATED),
    rule("mlp.linear_fc2.weight", "mlp.down_proj.weight", ShardLayout.COLUMNS),
)
JOINED_MLP = (rule("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", ShardLayout.JOINED), MLP[1])
"""Gate and up projection in one tensor."""
LATENT = (
    rule("self_attention.linear_q_proj.weight", _named("q", "weight"), ShardLayout.ROWS, "!q_lora_rank"),
    rule("self_attention.linear_q_down_proj.weight", _named("q_a", "weight"), ShardLayout.ROWS, "q_lora_rank"),
    rule("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", when="q_lora_rank"),
    rule("self_attention.linear_q_up_proj.weight", _named("q_b", "weight"), ShardLayout.ROWS, "q_lora_rank"),
    rule("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", ShardLayout.ROWS),
    rule("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    rule("self_attention.linear_kv_up_proj.weight", _named("kv_b", "weight"), ShardLayout.ROWS),
    ATTENTION[1],
)
"""Multi-latent attention."""


def qkv_bias(when: str = "") -> tuple[Rule, ...]:
    """Return the rule of biases of queries, keys and values, for configs in which `when` is true."""
    return (rule("self_attention.linear_qkv.bias", _named("q k v", "bias"), ShardLayout.QKV, when),)


def _gated(megatron: str, hf: str) -> tuple[Rule, ...]:
    gate, up, down = (f"mlp.{hf}.{name}_proj.weight" for name in ("gate", "up", "down"))
    first = rule(f"mlp.{megatron}.linear_fc1.weight", f"{gate} {up}", ShardLayout.GATED)
    return first, rule(f"mlp.{megatron}.linear_fc2.weight", down, ShardLayout.COLUMNS)


EXPERTS = (rule("mlp.router.weight", "mlp.gate.weight"), *_gated("experts.local_experts.{expert}", "experts.{expert}"))
"""A layer's experts. The router chooses some for each token by a softmax."""
GATED_EXPERT = (
    *_gated("shared_experts", "shared_expert"),
    rule("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
)
"""An expert for every token, weighted by its own gate."""
SIGMOID_EXPERTS = (
    *EXPERTS,
    rule("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    *_gated("shared_experts", "shared_experts"),
)
"""Experts with sigmoid scores and a bias that is not trained, and a shared one (DeepSeek-V3, arXiv:2412.19437)."""
DENSE = (*NORMS, *ATTENTION, *MLP)  # Llama's decoder layer: pre-norm, gated MLP, grouped-query attention
_QWEN2 = ModelFamily("qwen2", (*DENSE, *qkv_bias()))
_GLM = ModelFamily(
    "glm", (*NORMS, *ATTENTION, *qkv_bias("attention_bias"), *JOINED_MLP), interleaved=True, partial=True
)
_GLM_MOE = (*DENSE, *(replace(rule, when="use_qk_norm") for rule in QK_NORM), *qkv_bias("attention_bias"))
_DEEPSEEK = ModelFamily("deepseek_v3", (*NORMS, *LATENT, *MLP), ("attention_bias",), experts=SIGMOID_EXPERTS)
FAMILIES: tuple[ModelFamily, ...] = (
    _QWEN2,  # Qwen2 and Qwen2.5
    replace(_QWEN2, model_type="mimo", like="qwen2"),  # MiMo; its multi-token prediction layers are not trained
    ModelFamily("qwen3", (*DENSE, *QK_NORM), ("attention_bias",)),
    ModelFamily("llama", DENSE, ("attention_bias", "mlp_bias")),  # Llama 2 and 3, and others of that shape
    ModelFamily("mistral", DENSE),
    _GLM,  # GLM-4
    replace(_GLM, model_type="glm4", layer_rules=(*_GLM.layer_rules, *AFTER)),  # GLM-4-0414 and GLM-Z1
    ModelFamily("qwen2_moe", (*DENSE, *qkv_bias("qkv_bias")), experts=(*EXPERTS, *GATED_EXPERT)),  # Qwen1.5 and Qwen2
    ModelFamily("qwen3_moe", (*DENSE, *QK_NORM), ("attention_bias",), experts=EXPERTS),
    ModelFamily("glm4_moe", _GLM_MOE, partial=True, experts=SIGMOID_EXPERTS),  # GLM-4.5 to 4.7
    _DEEPSEEK,  # DeepSeek V3, V3.1 and R1, Moonlight
    replace(_DEEPSEEK, model_type="kimi_k2", like="deepseek_v3"),
    replace(_DEEPSEEK, model_type="glm4_moe_lite"),  # GLM-4.7-Flash
)
