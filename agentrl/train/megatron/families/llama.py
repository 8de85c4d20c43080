"""Llama 2 and 3 dense models, and others of the same shape: no biases, no head norms."""

from agentrl.train.megatron.families.base import Family, decoder_rules

FAMILY = Family("llama", decoder_rules(), refuse=("attention_bias", "mlp_bias"))
