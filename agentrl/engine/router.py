"""Former name of `agentrl.gateway.router`, for one release."""

from importlib import import_module


def __getattr__(name: str) -> object:
    return getattr(import_module("agentrl.gateway.router"), name)
