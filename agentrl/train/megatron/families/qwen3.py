"""Qwen3 dense models: a norm on each head's query and key, no biases."""

from agentrl.train.megatron.families.base import Family
from agentrl.train.megatron.families.rules import DENSE, QK_NORM

FAMILY = Family("qwen3", (*DENSE, *QK_NORM), refuse=("attention_bias",))
