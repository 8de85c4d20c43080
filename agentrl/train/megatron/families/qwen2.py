"""Qwen2 and Qwen2.5 dense models: bias on q, k and v."""

from agentrl.train.megatron.families.base import Family, decoder_rules

FAMILY = Family("qwen2", decoder_rules(qkv_bias=True), qkv_bias=True, refuse=("use_sliding_window",))
