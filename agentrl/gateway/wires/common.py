"""Parts that the wire formats share: fields of a request by name and type, texts, and server-sent events."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby
from typing import Any, TypeVar

import orjson

from agentrl.gateway.contracts import AgentRequest, Body, Memo, Refusal
from agentrl.gateway.live import LiveTurn
from agentrl.media import is_image
from agentrl.sample import Message

Content = str | list[Body]
T = TypeVar("T")

_NAMES: Mapping[type, str] = {type(None): "null", bool: "true or false", int: "a whole number", float: "a number"}
_NAMES = {**_NAMES, str: "text", list: "a list", dict: "an object", object: "a value"}
_MAX_STOPS = 16
_LONGEST_STOP = 256
_UNSUPPORTED = ["logit_bias", "logprobs", "top_logprobs", "echo", "prediction", "background", "audio", "functions"]
_UNSUPPORTED += ["prompt", "conversation"]
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class Fields:
    """A JSON object in a request. Its methods raise Refusal with the field's path if a field has another type. Null
    means absent."""

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, dict):
            raise Refusal(f"{path or 'the body'}: expected an object, got {_NAMES[type(value)]}")
        self._value, self._path = value, path

    def refusal(self, name: str, reason: str) -> Refusal:
        return Refusal(f"{self._below(name)}: {reason}")

    def get(self, name: str, kind: type[T]) -> T | None:
        """Return a field of exactly this type, or of any type for `object`; None if it is absent."""
        value = self._value.get(name)
        if value is None or kind is object or type(value) is kind:
            return value
        raise self.refusal(name, f"expected {_NAMES[kind]}, got {_NAMES[type(value)]}")

    def need(self, name: str, kind: type[T]) -> T:
        if (value := self.get(name, kind)) is None:
            raise self.refusal(name, f"is missing; expected {_NAMES[kind]}")
        return value

    def positive(self, name: str) -> int | None:
        """Return a whole number from 1; None if it is absent."""
        if (value := self.get(name, int)) is not None and value < 1:
            raise self.refusal(name, f"expected a whole number from 1, got {value}")
        return value

    def stops(self, name: str) -> tuple[str, ...]:
        given = self.get(name, object)
        stops = [given] if isinstance(given, str) else self.get(name, list) or []
        fits = all(isinstance(stop, str) and 0 < len(stop) <= _LONGEST_STOP for stop in stops)
        if len(stops) > _MAX_STOPS or not fits:
            raise self.refusal(name, f"expected at most {_MAX_STOPS} strings of 1 to {_LONGEST_STOP} characters")
        return tuple(stops)

    def role(self, *roles: str) -> str:
        """Return a message's role, one of `roles`. `developer` is another name of `system`."""
        if (role := self.need("role", str)) not in (*roles, "developer"):
            raise self.refusal("role", f"expected {', '.join(roles)}")
        return "system" if role == "developer" else role

    def inner(self, name: str) -> "Fields":
        """Return an object's fields; an absent object has none."""
        return Fields(self.get(name, dict) or {}, self._below(name))

    def each(self, name: str) -> "Iterator[Fields]":
        """Yield the objects of a list; an absent list has none."""
        for index, value in enumerate(self.get(name, list) or ()):
            yield Fields(value, f"{self._below(name)}[{index}]")

    def parts(self, name: str) -> "Iterable[Fields]":
        """Return the parts of a content; a string is one text part."""
        content = self.get(name, object)
        return [Fields({"type": "text", "text": content}, name)] if isinstance(content, str) else self.each(name)

    def text(self, name: str) -> str:
        return joined(part.part_text() for part in self.parts(name))

    def content(self, name: str) -> Content:
        return content_of(self.parts(name))

    def part_or_text(self) -> Body | str:
        """Return a part of content: an image unchanged, or a text."""
        return self._value if is_image(self._value) else self.part_text()

    def part_text(self) -> str:
        if (kind := self.need("type", str)) not in _TEXT_PARTS:
            raise self.refusal("type", f"{kind!r:.80} is not supported here; send text")
        return self.need(_TEXT_PARTS[kind], str)

    def _below(self, name: str) -> str:
        return f"{self._path}.{name:.80}" if self._path else f"{name:.80}"


class BodyFields(Fields):
    """The fields of a request's body. `ignored`: names of the fields that were not read, and kinds of tools that were
    left out. `memo`: the results of `once` for earlier requests."""

    def __init__(self, value: Any, memo: Memo | None = None) -> None:
        super().__init__(value)
        self.memo = memo or Memo()
        self.ignored = {name for name, given in value.items() if given is not None}

    def get(self, name: str, kind: type[T]) -> T | None:
        """Return a field as `Fields.get` does, and count it as read."""
        self.ignored.discard(name)
        return super().get(name, kind)

    def once(self, name: str, read: Callable[[Fields], Iterable[T]]) -> list[T]:
        """Return what `read` yields for the objects of a list. An object that is in the memo is not read again."""
        parts, before = self.memo.parts, self.memo.last.get(read, [])
        known = self.memo.last[read] = before[: len(values := self.get(name, list) or [])]
        for index, value in enumerate(values):
            raw = orjson.dumps(value)
            if index >= len(before) or before[index][0] != raw:  # comparing is faster than hashing
                if (found := parts.get((read, raw))) is None:
                    raw = bytes(memoryview(raw))  # orjson's own result keeps more memory than it has bytes
                    found = parts[read, raw] = raw, tuple(read(Fields(value, f"{name}[{index}]")))
                known[index : index + 1] = [found]
        return [item for _, found in known for item in found]

    def usable(self, name: str, read: Callable[[Fields], Iterable[T | str]]) -> list[T]:
        """Return a list of tools as `once` does. A string is the kind of a tool that is left out."""
        found = self.once(name, read)
        self.ignored |= {f"tool:{tool:.80}" for tool in found if isinstance(tool, str)}
        return [tool for tool in found if not isinstance(tool, str)]


def content_of(parts: Iterable[Fields]) -> Content:
    found: list[Body] = []
    for part in parts:
        if isinstance(given := part.part_or_text(), dict):
            found.append(given)
        elif found and not is_image(found[-1]):
            found[-1] = {"type": "text", "text": joined([found[-1]["text"], given])}
        else:
            found.append({"type": "text", "text": given})
    if any(map(is_image, found)):
        return found
    return found[0]["text"] if found else ""


def joined(texts: Iterable[str]) -> str:
    """Join the texts that are not empty with a blank line."""
    return "\n\n".join(filter(None, texts))


def schema(tool: Fields, parameters: Body | None, name: str = "") -> Body:
    described = {"description": text} if (text := tool.get("description", str)) else {}
    given = {"name": name or tool.need("name", str), **described}
    return {"type": "function", "function": {**given, "parameters": parameters or {"type": "object", "properties": {}}}}


def agent_request(
    body: BodyFields, headers: Mapping[str, str], messages: Sequence[Message], tools: list[Body], **more: Any
) -> AgentRequest:
    """Make a request from its parts and the fields that the wire formats share. `more`: fields of the request."""
    _check(body)
    if form := _form(body):
        at = more.get("instructions", 0)
        messages = [*messages[:at], {"role": "system", "content": form}, *messages[at:]]
        more["instructions"] = at + 1
    if not messages or messages[-1]["role"] == "assistant":
        raise Refusal("messages: the last one must be a user's or a tool's; an assistant's message is not continued")
    choice = body.get("tool_choice", object)
    chosen = choice.get("type") if isinstance(choice, dict) else choice
    if chosen not in (None, "auto", "none"):
        raise body.refusal("tool_choice", "only auto and none are supported; a call cannot be forced")
    spawned = "x-codex-parent-thread-id" in headers  # Codex sends a thread id for its main agent too
    return AgentRequest(
        messages=list(in_order_of_calls(messages)),
        tools=[] if chosen == "none" else tools,
        model=body.get("model", str) or "",
        stream=body.get("stream", bool) or False,
        agent=headers.get("x-claude-code-agent-id") or (headers.get("thread-id", "") if spawned else ""),
        **more,
        ignored=tuple(sorted(body.ignored)),
    )


def _check(body: Fields) -> None:
    for name in _UNSUPPORTED:
        if body.get(name, object):
            raise body.refusal(name, "is not supported")
    if (body.get("n", int) or 1) != 1:
        raise body.refusal("n", "only 1 is supported; ask again for another answer")
    if body.get("modalities", list) not in (None, [], ["text"]):
        raise body.refusal("modalities", "only text is supported")


def _form(body: Fields) -> str:
    """Return the instruction that asks for the answer's form; "" for text. The engine does not enforce the form,
    because forced tokens are not samples of the policy."""
    formats = [(body.inner(name), "format") for name in ("text", "output_config")]
    for holder, name in (*formats, (body, "output_format"), (body, "response_format")):
        match (given := holder.inner(name)).get("type", object):
            case None | "text":
                continue
            case "json_object":
                return "Answer with a JSON object, without any other text."
            case "json_schema":
                described = given.inner("json_schema") if name == "response_format" else given
                shown = orjson.dumps(described.need("schema", dict)).decode()
                return f"Answer with JSON of this schema, without any other text:\n{shown}"
            case _:
                raise holder.refusal(name, "only text, json_object and json_schema are supported")
    return ""


def in_order_of_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Put results that follow each other in the order of their calls: most chat templates do not show the ids."""
    places, numbers = dict[Any, int](), count()
    for results, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        if results:
            yield from sorted(run, key=lambda message: places.get(message.get("tool_call_id"), -1))
            continue
        for message in run:  # some agents use the same ids in each turn: the last call of an id counts
            places |= {call["id"]: next(numbers) for call in message.get("tool_calls", ())}
            yield message


def event(data: Body, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + orjson.dumps(data) + b"\n\n"


class OpenAIErrors:
    """Errors of OpenAI's two wire formats. A comment keeps a stream open."""

    def keep_alive(self, request: AgentRequest, live: LiveTurn) -> bytes:
        return b": keep-alive\n\n"

    def status(self, refusal: Refusal) -> int:
        return refusal.status

    def error(self, refusal: Refusal) -> Body:
        kind = "server_error" if refusal.status >= 500 else refusal.reason or "invalid_request_error"
        code = _CODES.get(refusal.kind, "server_error")
        return {"error": {"message": str(refusal), "type": kind, "param": None, "code": code}}


_CODES = {"invalid": "invalid_request", "not_found": "not_found", "context": "context_length_exceeded"}
_CODES |= {"limit": "rate_limit_exceeded"}
