"""The families: each a model type and its rules."""

from dataclasses import replace

from agentrl.train.megatron.families.base import Family
from agentrl.train.megatron.families.rules import (
    AFTER,
    ATTENTION,
    DENSE,
    EXPERTS,
    GATED_EXPERT,
    JOINED_MLP,
    LATENT,
    MLP,
    NORMS,
    QK_NORM,
    SIGMOID_EXPERTS,
    qkv_bias,
)

_GLM = Family("glm", (*NORMS, *ATTENTION, *qkv_bias("attention_bias"), *JOINED_MLP), interleaved=True, partial=True)
_GLM_MOE = (*DENSE, *(replace(rule, when="use_qk_norm") for rule in QK_NORM), *qkv_bias("attention_bias"))
_DEEPSEEK = Family("deepseek_v3", (*NORMS, *LATENT, *MLP), ("attention_bias",), experts=SIGMOID_EXPERTS)

FAMILIES: tuple[Family, ...] = (
    Family("qwen2", (*DENSE, *qkv_bias())),  # Qwen2 and Qwen2.5
    Family("qwen3", (*DENSE, *QK_NORM), ("attention_bias",)),
    Family("llama", DENSE, ("attention_bias", "mlp_bias")),  # Llama 2 and 3, and others of that shape
    Family("mistral", DENSE),
    _GLM,  # GLM-4
    replace(_GLM, model_type="glm4", layer_rules=(*_GLM.layer_rules, *AFTER)),  # GLM-4-0414 and GLM-Z1
    Family("qwen2_moe", (*DENSE, *qkv_bias("qkv_bias")), experts=(*EXPERTS, *GATED_EXPERT)),  # Qwen1.5 and Qwen2
    Family("qwen3_moe", (*DENSE, *QK_NORM), ("attention_bias",), experts=EXPERTS),
    Family("glm4_moe", _GLM_MOE, partial=True, experts=SIGMOID_EXPERTS),  # GLM-4.5 to 4.7
    _DEEPSEEK,  # DeepSeek V3, V3.1 and R1, Moonlight
    replace(_DEEPSEEK, model_type="kimi_k2", like="deepseek_v3"),
    replace(_DEEPSEEK, model_type="glm4_moe_lite"),  # GLM-4.7-Flash
)
