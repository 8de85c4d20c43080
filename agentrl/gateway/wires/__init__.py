"""The wire formats that agents speak, by path. Each reads requests into the common form and writes turns as answers."""

from collections.abc import Mapping

from agentrl.gateway.contracts import Wire
from agentrl.gateway.wires.chat import ChatWire
from agentrl.gateway.wires.messages import MessagesWire
from agentrl.gateway.wires.responses import ResponsesWire

WIRES: Mapping[str, Wire] = {
    "/chat/completions": ChatWire(),
    "/messages": MessagesWire(),
    "/responses": ResponsesWire(),
}

__all__ = ["WIRES"]
