"""DeepSeek V3 and R1, Moonlight, Kimi K2, GLM-4.7-Flash: multi-latent attention, and experts as in GLM-4.5."""

from dataclasses import replace

from agentrl.train.megatron.families.base import Family
from agentrl.train.megatron.families.rules import LATENT, MLP, NORMS, SIGMOID_EXPERTS

DEEPSEEK_V3 = Family("deepseek_v3", (*NORMS, *LATENT, *MLP), ("attention_bias",), experts=SIGMOID_EXPERTS)
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2", like="deepseek_v3")
GLM4_MOE_LITE = replace(DEEPSEEK_V3, model_type="glm4_moe_lite")
