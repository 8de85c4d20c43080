"""Mixtures of experts whose attention is as in dense models: Qwen1.5 to Qwen3, and GLM-4.5 to GLM-4.7."""

from dataclasses import replace

from agentrl.train.megatron.families.base import Family
from agentrl.train.megatron.families.rules import DENSE, EXPERTS, GATED_EXPERT, QK_NORM, SIGMOID_EXPERTS, qkv_bias

QWEN2_MOE = Family("qwen2_moe", (*DENSE, *qkv_bias("qkv_bias")), experts=(*EXPERTS, *GATED_EXPERT))
QWEN3_MOE = Family("qwen3_moe", (*DENSE, *QK_NORM), ("attention_bias",), experts=EXPERTS)
_GLM = (*DENSE, *(replace(rule, when="use_qk_norm") for rule in QK_NORM), *qkv_bias("attention_bias"))
GLM4_MOE = Family("glm4_moe", _GLM, partial=True, experts=SIGMOID_EXPERTS)
