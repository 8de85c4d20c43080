"""`agentrl demo`."""

from agentrl.demo.__main__ import main as command

__all__ = ["command"]
