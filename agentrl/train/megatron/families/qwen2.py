"""Qwen2 and Qwen2.5 dense models: bias on q, k and v."""

from agentrl.train.megatron.families.base import Family
from agentrl.train.megatron.families.rules import DENSE, qkv_bias

FAMILY = Family("qwen2", (*DENSE, *qkv_bias()))
