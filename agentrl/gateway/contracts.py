"""Types that the gateway's modules exchange: a request in one common form, and the model's turn."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.chat import ParsedTurn
from agentrl.errors import AgentRLError, Failure
from agentrl.sample import Message

Body = dict[str, Any]
RefusalKind = Literal["invalid", "not_found", "context", "limit", "overloaded", "failed"]


@dataclass(frozen=True, slots=True)
class Memo:
    """Cache of the wire formats for one session.

    Attributes:
        parts: parts of requests as JSON and as parsed, by the function that parsed the part and by the part's JSON.
        last: the parts of the last request in order, by the function.
        items: items of answers in OpenAI's responses format, by id, parsed as if the agent had sent them back."""

    parts: dict[tuple[Callable[..., Any], bytes], tuple[bytes, tuple[Any, ...]]] = field(default_factory=dict)
    last: dict[Callable[..., Any], list[tuple[bytes, tuple[Any, ...]]]] = field(default_factory=dict)
    items: dict[str, Any] = field(default_factory=dict)


class Refusal(AgentRLError):
    """A request that gets an error in place of a turn.

    Attributes:
        kind: `invalid` (400), `not_found` (404), `context` (400: the prompt does not fit; at the message "prompt is too
            long: N tokens > M maximum" agents compact), `limit` (429: a limit of the session), `overloaded` (503: no
            engine answers), `failed` (502: the engines failed).
        reason: for `limit`, the limit's name, for example `requests`.
        failure: for `overloaded` and `failed`, the failure that the agent did not cause."""

    def __init__(self, message: str, kind: RefusalKind = "invalid", reason: str = "") -> None:
        super().__init__(message)
        self.kind: RefusalKind = kind
        self.reason = reason
        self.failure: Failure | None = None

    @property
    def status(self) -> int:
        """The HTTP status, unless the wire format defines another."""
        return _STATUS[self.kind]


_STATUS = {"invalid": 400, "not_found": 404, "context": 400, "limit": 429, "overloaded": 503, "failed": 502}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """A request of an agent in the common form.

    Attributes:
        messages: chat messages in OpenAI's form. System messages are where the agent put them; a developer's message
            becomes one. Text parts are one string. With images, contents of users and tools are lists of parts. Calls
            have ids. Tool results have `tool_call_id`, and are in the order of their calls.
        tools: schemas in OpenAI's function form, in the agent's order.
        model: the model's name as the agent wrote it; the answer repeats it.
        stream: the agent asked for events.
        max_tokens: the agent's own limit on the turn, at least 1; None if it gave none.
        stop: the agent's own stop strings, at most 16 of at most 256 characters.
        previous: `AgentTurn.id` of an earlier answer that `messages` continue (`previous_response_id` without prefix).
        stored: the agent may continue the answer by its id.
        agent: the name of the program's sub-agent that sent the request; "" if the request names none.
        instructions: number of messages at the front that belong to this request only: they are not stored with the
            answer's id. With `previous` they are placed before the earlier messages.
        usage: a stream of chat completions ends with a chunk of usage.
        thinking: an answer in Anthropic's messages shows the reasoning.
        call_forms: name of a tool -> the fields of an item that calls the tool, in OpenAI's responses format.
        ignored: accepted fields without effect, for example `temperature`: sampling belongs to the session."""

    messages: list[Message]
    tools: list[Body] = field(default_factory=list)
    model: str = ""
    stream: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    previous: str = ""
    stored: bool = False
    agent: str = ""
    instructions: int = 0
    usage: bool = False
    thinking: bool = False
    call_forms: Mapping[str, Body] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """The model's turn, in the form that every wire format receives.

    Attributes:
        id: the answer's id, unique in the session; without a wire's prefix (`chatcmpl-`, `resp_`, `msg_`).
        created: Unix time in seconds.
        parsed: content, reasoning and calls; the ids of the calls are unique in the session. A broken call is text in
            `content`, so that the agent sees it.
        finish: `stop`, `calls` (the turn has tool calls) or `length`.
        prompt_tokens, cached_tokens, completion_tokens: counts for the agent's usage display.
        stop: the request's stop string that ended the turn. `content` ends before it; the model's ids include it."""

    id: str
    created: int
    parsed: ParsedTurn = field(default_factory=lambda: ParsedTurn(""))
    finish: Literal["stop", "calls", "length"] = "stop"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    stop: str | None = None
