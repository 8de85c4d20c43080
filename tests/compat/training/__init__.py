"""Tests of hooks in the training step."""

import tests.train.megatron  # noqa: F401  # loads Megatron without torch's compiler
