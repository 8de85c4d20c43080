"""Types that the gateway's modules exchange: a request in one common form, and the model's turn."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.chat import ParsedTurn
from agentrl.errors import AgentRLError
from agentrl.sample import Message

Body = dict[str, Any]
RefusalKind = Literal["invalid", "not_found", "context", "limit", "overloaded", "failed"]


@dataclass(frozen=True, slots=True)
class Memo:
    """A session's parts that the wire formats remember.

    Attributes:
        parts: of requests, by the function that read them and their JSON.
        items: of answers in responses, by their ids, as they are read if the agent sends them back."""

    parts: dict[tuple[Callable[..., Any], bytes], tuple[Any, ...]] = field(default_factory=dict)
    items: dict[str, Any] = field(default_factory=dict)


class Refusal(AgentRLError):
    """A request that gets an error in place of a turn.

    Attributes:
        kind: `invalid` (400), `not_found` (404), `context` (400: the prompt does not fit, such that agents compact; the
            message is "prompt is too long: N tokens > M maximum"), `limit` (429: a limit of the session), `overloaded`
            (503: no engine answers), `failed` (502: the engines failed).
        reason: for `limit`, the limit's name, for example `requests`."""

    def __init__(self, message: str, kind: RefusalKind = "invalid", reason: str = "") -> None:
        super().__init__(message)
        self.kind: RefusalKind = kind
        self.reason = reason

    @property
    def status(self) -> int:
        """The HTTP status, if the wire format has none of its own."""
        return _STATUS[self.kind]


_STATUS = {"invalid": 400, "not_found": 404, "context": 400, "limit": 429, "overloaded": 503, "failed": 502}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """A request of an agent in the common form.

    Attributes:
        messages: chat messages in OpenAI's form, system messages (also a developer's) where the agent put them. Text parts
            are one string; with images, contents of users and tools are lists of parts. Calls have their ids. Tool results have `tool_call_id`, and the order of their calls.
        tools: schemas in OpenAI's function form, in the agent's order.
        model: the model's name as the agent wrote it; it goes back in the answer.
        stream: the agent asked for events.
        max_tokens: the agent's own limit on the turn, at least 1; None if it gave none.
        stop: the agent's own stop strings, at most 16 of at most 256 characters.
        previous: `AgentTurn.id` of an earlier answer that `messages` continue (`previous_response_id`, without its prefix).
        stored: the agent may continue the answer by its id.
        agent: the name under which a program's own sub-agents speak; "" if the request does not say.
        instructions: number of messages at the front that belong to this request only; an answer's id does not stand for
            them. With `previous` they go in front of the earlier messages.
        usage: a stream of chat completions ends with a chunk of usage.
        thinking: an answer in Anthropic's messages shows the reasoning.
        call_forms: for tools by name, the fields that an item of responses has in a call of the tool.
        ignored: fields that were accepted and have no effect, for example `temperature`: sampling belongs to the session.
    """

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
    """The model's turn, as every wire format is given it.

    Attributes:
        id: of the answer, unique in the session; without a wire's prefix (`chatcmpl-`, `resp_`, `msg_`).
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
