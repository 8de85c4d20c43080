"""`agentrl demo`."""

from agentrl.demo.run import DEMO

command = DEMO.command()
