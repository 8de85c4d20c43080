"""Tiny models: a Hugging Face folder with a tokenizer and a chat template, created or shipped.

1. `create` needs no network: the tokenizer is trained on a small text, the weights are random and depend on the seed
   alone. The same arguments give the same files.
2. `shipped` returns the folder of a model that was trained on a task. `examples.tiny_models.make` recreates the models.
3. The template is ChatML with Hermes tool calls. Its markup tags, every digit and every operator are single tokens,
   so that a model of under a million parameters can learn to copy numbers within minutes on a laptop.
4. torch and transformers are imported when `create` runs, not before."""

from pathlib import Path

from agentrl.tiny.create import Arch, create
from agentrl.tiny.tokenizer import CHAT_TEMPLATE, MARKUP_TOKENS, SPECIAL_TOKENS

__all__ = ["CHAT_TEMPLATE", "MARKUP_TOKENS", "SHIPPED", "SPECIAL_TOKENS", "Arch", "create", "shipped"]

SHIPPED = Path(__file__).parent / "models"


def shipped(name: str) -> Path:
    """Return the folder of a shipped model: `calculator`, `examples` or `tools`."""
    return SHIPPED / name
