"""Qwen3 dense models: a norm on each head's query and key, no biases."""

from agentrl.train.megatron.families.base import Family, decoder_rules

FAMILY = Family("qwen3", decoder_rules(qk_norm=True), qk_norm=True, refuse=("use_sliding_window", "attention_bias"))
