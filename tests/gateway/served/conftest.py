"""The vocabulary and the grammars of the engine's own tests."""

from tests.engine.embedded.conftest import folder
from tests.engine.embedded.test_grammar import grammars, vocab

__all__ = ["folder", "grammars", "vocab"]
