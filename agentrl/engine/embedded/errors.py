"""The error answers of the server, in the shapes that SGLang uses.

1. `{"error": {"message"}}`: the request was understood and refused.
2. `{"error": "text"}`: the sampling parameters could not be decoded.
3. `{"object": "error", "message", "type", "param", "code"}`: the JSON body did not fit the endpoint.
4. `{"success": false, "message"}`: weights could not be updated, and are as before.
"""

from typing import Any

from agentrl.errors import AgentRLError


class RequestError(AgentRLError):
    """A request is refused: `status` and `body` are what the client gets, `str(error)` is the bare message."""

    def __init__(self, message: str, body: dict[str, Any], status: int = 400) -> None:
        super().__init__(message)
        self.body = body
        self.status = status


def refused(message: str) -> RequestError:
    """A request that was understood but cannot be served."""
    return RequestError(message, {"error": {"message": message}})


def undecodable(message: str) -> RequestError:
    """Sampling parameters of the wrong type, or with unknown names."""
    return RequestError(message, {"error": message})


def update_refused(message: str) -> RequestError:
    """A weight update that cannot be done."""
    return RequestError(message, {"success": False, "message": message})


def openai_error(message: str, *, status: int = 400, kind: str = "Bad Request") -> RequestError:
    """The error form of the OpenAI endpoints, and of body validation everywhere."""
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return RequestError(message, body, status)


def invalid_body(kind: str, message: str, *loc: str) -> RequestError:
    """A body that does not fit the endpoint; `loc` is the path of the field."""
    detail = {"type": kind, "loc": ("body", *loc), "msg": message}
    return openai_error(f"1 validation error:\n  {detail}")
