"""The wire formats that agents speak, by path. Each reads requests into the common form and writes turns as answers.

A wire format (`Wire`) is pure code without tasks or clients. For example, the format of OpenAI's chat completions:

    request = wire.read(body, headers, memo)     # raises Refusal
    turn = await session.turn(request)           # raises Refusal
    response = wire.answer(request, turn)        # or, if request.stream: the parts of wire.events(request, live)"""

from collections.abc import Iterator, Mapping
from typing import Protocol

from agentrl.gateway.contracts import AgentRequest, AgentTurn, Body, Memo, Refusal
from agentrl.gateway.live import LiveTurn
from agentrl.gateway.wires.chat import ChatWire
from agentrl.gateway.wires.messages import MessagesWire
from agentrl.gateway.wires.responses import ResponsesWire


class Wire(Protocol):
    """One wire format. See this module's docstring for an example."""

    def read(self, body: Body, headers: Mapping[str, str], memo: Memo | None = None) -> AgentRequest:
        """Read a request. Raises Refusal: a field is malformed or not supported. `memo` belongs to the session: the
        wire adds each part that it reads, and reads equal parts once."""

    def answer(self, request: AgentRequest, turn: AgentTurn) -> Body:
        """Return the body of a whole answer."""

    def events(self, request: AgentRequest, live: LiveTurn) -> Iterator[bytes]:
        """Yield the server-sent events of an answer, the last one included, and b"" while the model writes."""

    def keep_alive(self, request: AgentRequest, live: LiveTurn) -> bytes:
        """Return bytes that keep a stream open while the model sends no text."""

    def status(self, refusal: Refusal) -> int:
        """Return the HTTP status of an error in this wire."""

    def error(self, refusal: Refusal) -> Body:
        """Return the body of an error in this wire's form. Clients decide by it to retry or to compact."""

    def error_event(self, refusal: Refusal, request: AgentRequest, live: LiveTurn) -> bytes:
        """Return the event of an error in a stream that has begun."""


WIRES: Mapping[str, Wire] = {
    "/chat/completions": ChatWire(), "/messages": MessagesWire(), "/responses": ResponsesWire(),
}  # fmt: skip

__all__ = ["WIRES", "Wire"]
