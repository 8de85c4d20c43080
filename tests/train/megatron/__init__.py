"""Tests of the Megatron backend. Megatron is loaded as in runs, without torch's compiler."""

from agentrl.train.megatron.device import uncompiled

with uncompiled():
    import agentrl.train.megatron.network  # noqa: F401
