"""Tiny models made on the spot: a Hugging Face folder with random weights, a tokenizer and a chat template.

1. `create` needs no network: the tokenizer is trained on a small text, the weights are random and depend on the seed
   alone. The same arguments give the same files.
2. The template is ChatML with Hermes tool calls. Its markup tags, every digit and every operator are single tokens,
   so that a model of under a million parameters can learn to copy numbers within minutes on a laptop.
3. torch and transformers are imported when `create` runs, not before.
"""

from agentrl.tiny.create import Arch, create
from agentrl.tiny.template import CHAT_TEMPLATE, MARKUP_TOKENS, SPECIAL_TOKENS

__all__ = ["CHAT_TEMPLATE", "MARKUP_TOKENS", "SPECIAL_TOKENS", "Arch", "create"]
