"""Llama 2 and 3 dense models, and others of the same shape: no biases, no head norms. Mistral is one of these."""

from agentrl.train.megatron.families.base import Family
from agentrl.train.megatron.families.rules import DENSE

LLAMA = Family("llama", DENSE, refuse=("attention_bias", "mlp_bias"))
MISTRAL = Family("mistral", DENSE)
