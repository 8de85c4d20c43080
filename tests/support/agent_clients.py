"""Agents that keep their own history, like programs on the SDKs of three wire formats. A transport calls an ASGI app as
a server does.

1. An `Agent` sends its whole history each time. `keep` appends an answer in one of the forms that SDKs and agents
   use: reasoning dropped or not, content null, arguments respelled. None of these forms is another conversation.
2. `Agent.prompts` returns the valid renderings of the agent's last request, in OpenAI's form.
3. A stream is read as strictly as by the SDKs: a missing, double or disordered event is an AssertionError.
"""

import asyncio
import copy
import json
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import httpx

Json = dict[str, Any]
TOOLS: list[Json] = [
    {
        "name": name,
        "description": f"To {name}.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    }
    for name in ("look", "run", "write")
]
WAIT = 60.0
"""Seconds after which an unanswered request fails its test."""


# ---- the transport --------------------------------------------------------------------------------------------


class AsgiTransport(httpx.AsyncBaseTransport):
    """Calls an app as an HTTP server does: an answer comes in pieces, the app learns that a client disconnected, and
    later data for that client is lost.

    A request's extension `target` is a path that is sent unchanged, dots included. `aclose` waits for the app's tasks.
    """

    def __init__(self, app: Any) -> None:
        self._app, self._tasks = app, set[asyncio.Task[None]]()
        self.errors: list[Exception] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        pieces: asyncio.Queue[Json] = asyncio.Queue()
        gone = asyncio.Event()
        parts = [body[at : at + 65536] for at in range(0, len(body), 65536)] or [b""]
        waiting = [
            {"type": "http.request", "body": part, "more_body": left > 0}
            for part, left in zip(parts, range(len(parts) - 1, -1, -1), strict=True)
        ]

        async def receive() -> Json:
            if waiting:
                return waiting.pop(0)
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Json) -> None:
            if not gone.is_set():
                pieces.put_nowait(message)

        async def serve() -> None:
            try:
                await self._app(_scope(request), receive, send)
            except Exception as error:  # noqa: BLE001
                self.errors.append(error)
                pieces.put_nowait({"type": "failed", "status": 500, "headers": []})

        task = asyncio.create_task(serve())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            async with asyncio.timeout(WAIT):
                start = await pieces.get()
        except BaseException:
            gone.set()
            raise
        if start["type"] == "failed":
            return httpx.Response(500)
        return httpx.Response(start["status"], headers=start["headers"], stream=_Pieces(pieces, gone))

    async def aclose(self) -> None:
        async with asyncio.timeout(WAIT):
            await asyncio.gather(*self._tasks, return_exceptions=True)


class _Pieces(httpx.AsyncByteStream):
    def __init__(self, pieces: asyncio.Queue[Json], gone: asyncio.Event) -> None:
        self._pieces, self._gone = pieces, gone

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            async with asyncio.timeout(WAIT):
                message = await self._pieces.get()
            if message["type"] == "failed":
                raise httpx.RemoteProtocolError("the app failed in the middle of an answer")
            more = message.get("more_body", False)
            yield message.get("body", b"")

    async def aclose(self) -> None:
        self._gone.set()


def _scope(request: httpx.Request) -> Json:
    raw: bytes = request.extensions.get("target", request.url.raw_path)
    path, _, query = raw.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(path.decode()),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8080),
        "state": {},
    }


# ---- reading answers ------------------------------------------------------------------------------------------


def events(text: str) -> list[tuple[str, str]]:
    """Return the (event, data) pairs of a stream of server-sent events, without comments."""
    assert text.endswith("\n\n"), f"a stream ends with an empty line, not with {text[-40:]!r}"
    found = []
    for block in text.split("\n\n"):
        lines = [line.partition(":") for line in block.split("\n") if line and not line.startswith(":")]
        data = [value.removeprefix(" ") for name, _, value in lines if name == "data"]
        name = "".join(value.strip() for name, _, value in lines if name == "event")
        if data:
            found.append((name, "\n".join(data)))
    return found


def join_chat(text: str) -> Json:
    """Join the chunks of a chat completion, as the OpenAI SDK does."""
    found = [data for _, data in events(text)]
    assert found[-1] == "[DONE]"
    message: Json = {"role": "assistant", "content": None}
    calls: dict[int, Json] = {}
    finishes: list[str] = []
    chunks = [json.loads(data) for data in found[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert choice["index"] == 0
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name) is not None:
                    message[name] = (message.get(name) or "") + delta[name]
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
                call |= {name: part[name] for name in ("id", "type") if part.get(name)}
                for name in ("name", "arguments"):
                    call["function"][name] += part.get("function", {}).get(name) or ""
            finishes += [choice["finish_reason"]] if choice.get("finish_reason") else []
    assert len(finishes) == 1, finishes
    assert sorted(calls) == list(range(len(calls)))
    if calls:
        message["tool_calls"] = [calls[at] for at in sorted(calls)]
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    choices = [{"index": 0, "message": message, "finish_reason": finishes[0]}]
    return {
        "id": chunks[0]["id"],
        "object": "chat.completion",
        "choices": choices,
        "usage": usage[-1] if usage else None,
    }


_DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "input_json_delta": ("tool_use", "partial_json"),
}


def join_messages(text: str) -> Json:
    """Join the events of an Anthropic message, as the Anthropic SDK does."""
    message: Json = {}
    opened: int | None = None
    ended = False
    for name, data in events(text):
        event = json.loads(data)
        kind = event["type"]
        assert name == kind
        assert not ended, f"{kind} behind message_stop"
        if kind == "ping":
            continue
        if kind == "message_start":
            assert not message
            message = event["message"]
            assert message["content"] == []
            continue
        assert message, f"{kind} before message_start"
        if kind == "content_block_start":
            assert opened is None
            assert event["index"] == len(message["content"])
            opened = event["index"]
            message["content"].append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            assert event["index"] == opened
            block, delta = message["content"][-1], event["delta"]
            of, field = _DELTAS[delta["type"]]
            assert block["type"] == of
            block[field] = block.get(field, "") + delta[field]
        elif kind == "content_block_stop":
            assert event["index"] == opened
            opened = None
        elif kind == "message_delta":
            assert opened is None
            message |= event["delta"]
            message["usage"] = {**message.get("usage", {}), **event["usage"]}
        else:
            assert kind == "message_stop", kind
            ended = True
    assert ended
    assert message["stop_reason"] in ("end_turn", "tool_use", "max_tokens", "stop_sequence")
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("partial_json", "") or "{}")
    return message


def join_responses(text: str) -> Json:
    """Join the events of a response. Codex takes items from `response.output_item.done`, the OpenAI SDK from the last
    event, so both must agree, and so must the deltas."""
    found = events(text)
    read = [json.loads(data) for _, data in found if data != "[DONE]"]
    assert [name for name, data in found if data != "[DONE]"] == [event["type"] for event in read]
    numbers = [event["sequence_number"] for event in read if "sequence_number" in event]
    assert numbers == sorted(set(numbers))
    assert read[0]["type"] == "response.created"
    assert read[-1]["type"] in ("response.completed", "response.incomplete")
    response: Json = read[-1]["response"]
    assert read[0]["response"]["id"] == response["id"]
    done = [(event["output_index"], event["item"]) for event in read if event["type"] == "response.output_item.done"]
    assert [at for at, _ in done] == list(range(len(done)))
    assert [item for _, item in done] == response["output"]
    texts: dict[tuple[str, int], str] = {}
    for event in read:
        if event["type"] in ("response.output_text.delta", "response.function_call_arguments.delta"):
            key = (event["type"].split(".")[1], event["output_index"])
            texts[key] = texts.get(key, "") + event["delta"]
    for at, item in enumerate(response["output"]):
        if item["type"] == "message":
            assert texts.get(("output_text", at), "") == "".join(part["text"] for part in item["content"])
        if item["type"] == "function_call":
            assert texts.get(("function_call_arguments", at), "") == item["arguments"]
    return response


# ---- agents ---------------------------------------------------------------------------------------------------


def respell(value: Any) -> Any:
    """Write the value as a JavaScript program does: 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [respell(item) for item in value]
    return {key: respell(item) for key, item in value.items()} if isinstance(value, dict) else value


class Refused(Exception):
    """A request that got an error."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"{response.status_code}: {response.text:.300}")
        self.status, self.body = response.status_code, response.text


class Agent(ABC):
    """A program with its own history.

    Attributes:
        history: in the wire's own form, without the system prompt.
        requests: valid renderings of each request: lists of (messages, tools) in OpenAI's form.
        plain: answers are kept unchanged.
    """

    wire: str
    path: str
    join: Callable[[str], Json]

    def __init__(
        self,
        client: httpx.AsyncClient,
        base: str,
        system: str = "You act.",
        tools: Sequence[Json] = TOOLS,
        *,
        seed: object = 0,
        plain: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.client, self.base, self.system, self.tools = client, base, system, list(tools)
        self.rng, self.plain, self.headers = random.Random(str(seed)), plain, dict(headers or {})
        self.history: list[Json] = []
        self.requests: list[list[tuple[list[Json], list[Json]]]] = []
        self._received: dict[int, Json] = {}

    # ---- a wire's own form

    @abstractmethod
    def body(self) -> Json:
        """Return the next request, without `stream`."""

    @abstractmethod
    def user(self, text: str) -> None:
        """Append a user message."""

    @abstractmethod
    def results(self, ids: Sequence[str], texts: Sequence[str]) -> None:
        """Append results of calls."""

    @abstractmethod
    def keep(self, answer: Json) -> list[str]:
        """Append an answer to the history. Returns the ids of its calls."""

    @abstractmethod
    def messages(self, history: Sequence[Json]) -> list[Json]:
        """Return the history in OpenAI's form."""

    @abstractmethod
    def edit(self, at: int) -> bool:
        """Change the text of a message of the history. Returns false if there is none."""

    # ---- the same on all wires

    def fork(self) -> "Agent":
        """Return another agent with a copy of the history."""
        other = type(self)(self.client, self.base, self.system, self.tools, seed=self.rng.random(), plain=self.plain)
        other.headers = dict(self.headers)
        other.history, other._received = copy.deepcopy(self.history), copy.deepcopy(self._received)
        return other

    def restart(self, kept: int) -> None:
        """Remove the history after its first messages."""
        self.history = self.history[:kept]
        self._received = {at: message for at, message in self._received.items() if at < kept}

    def chance(self, share: float) -> bool:
        return not self.plain and self.rng.random() < share

    def prompts(self) -> list[tuple[list[Json], list[Json]]]:
        """Return valid (messages, tools) of the next request: with the agent's own spelling or the model's, with
        reasoning or without."""
        received = [self._received.get(at, message) for at, message in enumerate(self.history)]
        variants = []
        for history in (self.history, received):
            messages = [{"role": "system", "content": self.system}] * bool(self.system) + self.messages(history)
            bare = [{key: value for key, value in m.items() if key != "reasoning_content"} for m in messages]
            variants += [messages, bare]
        schemas = [{"type": "function", "function": tool} for tool in self.tools]
        return [(messages, schemas) for at, messages in enumerate(variants) if messages not in variants[:at]]

    async def ask(self, *, stream: bool | None = None, **fields: Any) -> Json:
        """Send the history. Returns the answer, for a stream the joined one. Raises Refused: the answer is an error."""
        streams = self.rng.random() < 0.5 if stream is None else stream
        body = {**self.body(), "stream": streams, **fields}
        self.requests.append(self.prompts())
        response = await self.client.post(f"{self.base}/{self.path}", json=body, headers=self.headers)
        if response.status_code != 200:
            raise Refused(response)
        joined: Json = type(self).join(response.text) if streams else response.json()
        return joined

    async def turn(self, **fields: Any) -> list[str]:
        """Send the history and keep the answer. Returns the ids of its calls."""
        return self.keep(await self.ask(**fields))

    async def leave(self, pieces: int, *, patience: int = 3) -> None:
        """Send the history and disconnect: before the answer if `pieces` is 0, else after that many stream pieces."""
        body = {**self.body(), "stream": pieces > 0 or self.rng.random() < 0.5}
        self.requests.append(self.prompts())
        request = self.client.build_request("POST", f"{self.base}/{self.path}", json=body, headers=self.headers)
        if not pieces:
            sending = asyncio.ensure_future(self.client.send(request, stream=True))
            for _ in range(patience):
                await asyncio.sleep(0)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            if not sending.cancelled():
                await sending.result().aclose()
            return
        response = await self.client.send(request, stream=True)
        read = response.aiter_raw()
        for _ in range(pieces):
            await anext(read, b"")
        await response.aclose()

    def _append(self, as_kept: Json, as_received: Json) -> None:
        self._received[len(self.history)] = as_received
        self.history.append(as_kept)


class ChatAgent(Agent):
    """An agent on OpenAI's chat completions."""

    wire, path, join = "chat", "chat/completions", staticmethod(join_chat)

    def body(self) -> Json:
        system = [{"role": "system", "content": self.system}] * bool(self.system)
        body: Json = {"model": "m", "messages": [*system, *self.history], "temperature": 0.3}
        if self.tools:
            body["tools"] = [{"type": "function", "function": tool} for tool in self.tools]
        if self.chance(0.5):
            body["stream_options"] = {"include_usage": True}
        return body

    def user(self, text: str) -> None:
        parts = [{"type": "text", "text": text}]
        self.history.append({"role": "user", "content": parts if self.chance(0.2) else text})

    def results(self, ids: Sequence[str], texts: Sequence[str]) -> None:
        for id_, text in zip(ids, texts, strict=True):
            self.history.append({"role": "tool", "tool_call_id": id_, "content": text})

    def keep(self, answer: Json) -> list[str]:
        received = answer["choices"][0]["message"]
        message = copy.deepcopy(received)
        if self.chance(0.5):
            message.pop("reasoning_content", None)
        if not message.get("content") and self.chance(0.5):
            message["content"] = self.rng.choice(["", None])
        elif message.get("content") and self.chance(0.2):
            message["content"] = [{"type": "text", "text": message["content"]}]
        elif message.get("content") and self.chance(0.2):
            message["content"] = message["content"].strip() + self.rng.choice(["", "\n", " "])
        if self.chance(0.3):
            message |= {"refusal": None, "annotations": [], "audio": None, "function_call": None}
        for call in message.get("tool_calls") or ():
            if self.chance(0.5):
                call["function"]["arguments"] = self._spelled(call["function"]["arguments"])
        self._append(message, received)
        return [call["id"] for call in message.get("tool_calls") or ()]

    def _spelled(self, arguments: str) -> str:
        value = respell(json.loads(arguments))
        plain = self.rng.choice([(",", ":"), (", ", ": ")])
        ascii_only, ordered = self.rng.random() < 0.5, self.rng.random() < 0.5
        return json.dumps(value, separators=plain, ensure_ascii=ascii_only, sort_keys=ordered)

    def messages(self, history: Sequence[Json]) -> list[Json]:
        found = []
        for message in history:
            content = message.get("content") or ""
            text = content if isinstance(content, str) else "".join(part["text"] for part in content)
            kept = {key: message[key] for key in ("role", "reasoning_content", "tool_call_id") if message.get(key)}
            calls = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
            found.append({**kept, "content": text, **calls})
        return found

    def edit(self, at: int) -> bool:
        message = self.history[at] = copy.deepcopy(self.history[at])
        if not isinstance(message.get("content"), str):
            return False
        message["content"] += " edited"
        self._received.pop(at, None)
        return True


class MessagesAgent(Agent):
    """An agent on Anthropic's messages."""

    wire, path, join = "messages", "messages", staticmethod(join_messages)

    def body(self) -> Json:
        body: Json = {"model": "m", "max_tokens": 4096, "messages": copy.deepcopy(self.history)}
        if self.system:
            mark = {} if self.plain else {"cache_control": {"type": "ephemeral"}}
            body["system"] = self.system if self.chance(0.3) else [{"type": "text", "text": self.system, **mark}]
        last = body["messages"][-1]["content"]
        if not self.plain and isinstance(last, list) and last:
            last[-1]["cache_control"] = {"type": "ephemeral"}  # it moves along with the conversation
        if self.tools:
            body["tools"] = [
                {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
                for tool in self.tools
            ]
        return body

    def user(self, text: str) -> None:
        blocks = [{"type": "text", "text": text}]
        self.history.append({"role": "user", "content": blocks if self.chance(0.5) else text})

    def results(self, ids: Sequence[str], texts: Sequence[str]) -> None:
        blocks: list[Json] = []
        for id_, text in zip(ids, texts, strict=True):
            content = [{"type": "text", "text": text}] if self.chance(0.4) else text
            error = {"is_error": False} if self.chance(0.3) else {}
            blocks.append({"type": "tool_result", "tool_use_id": id_, "content": content, **error})
        if self.chance(0.15):
            blocks.append({"type": "text", "text": f"<system-reminder>{self.rng.random()}</system-reminder>"})
        self.history.append({"role": "user", "content": blocks})

    def keep(self, answer: Json) -> list[str]:
        received = {"role": "assistant", "content": answer["content"]}
        blocks = copy.deepcopy(answer["content"])
        if self.chance(0.5):
            blocks = [block for block in blocks if block["type"] != "thinking"]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = block["input"] if self.plain else respell(block["input"])
            if block["type"] == "text" and self.chance(0.3):
                block["citations"] = None
        self._append({"role": "assistant", "content": blocks}, received)
        return [block["id"] for block in blocks if block["type"] == "tool_use"]

    def messages(self, history: Sequence[Json]) -> list[Json]:
        found: list[Json] = []
        for message in history:
            content = message["content"]
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if message["role"] == "assistant":
                found.append(_assistant(blocks))
                continue
            for block in blocks:
                if block["type"] == "tool_result":
                    inner = block["content"]
                    text = inner if isinstance(inner, str) else "".join(part["text"] for part in inner)
                    found.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
                else:
                    found.append({"role": "user", "content": block["text"]})
        return found

    def edit(self, at: int) -> bool:
        message = self.history[at] = copy.deepcopy(self.history[at])
        self._received.pop(at, None)
        if isinstance(message["content"], str):
            message["content"] += " edited"
            return True
        for block in message["content"]:
            if block["type"] == "text":
                block["text"] += " edited"
                return True
            if block["type"] == "tool_result":
                block["content"] = "[cleared]"
                return True
        return False


def _assistant(blocks: Sequence[Json]) -> Json:
    message: Json = {"role": "assistant", "content": "".join(b["text"] for b in blocks if b["type"] == "text")}
    if thinking := [block["thinking"] for block in blocks if block["type"] == "thinking"]:
        message["reasoning_content"] = "".join(thinking)
    if calls := [block for block in blocks if block["type"] == "tool_use"]:
        message["tool_calls"] = [_call(call["id"], call["name"], call["input"]) for call in calls]
    return message


def _call(id_: str, name: str, arguments: Any) -> Json:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


class ResponsesAgent(Agent):
    """An agent on OpenAI's responses, with its own history."""

    wire, path, join = "responses", "responses", staticmethod(join_responses)

    def body(self) -> Json:
        body: Json = {"model": "m", "input": self.history, "store": False}
        if self.system:
            body["instructions"] = self.system
        if self.tools:
            body["tools"] = [{"type": "function", **tool} for tool in self.tools]
        return body

    def user(self, text: str) -> None:
        parts = [{"type": "input_text", "text": text}]
        typed = {"type": "message"} if self.chance(0.7) else {}
        self.history.append({**typed, "role": "user", "content": parts if self.chance(0.7) else text})

    def results(self, ids: Sequence[str], texts: Sequence[str]) -> None:
        for id_, text in zip(ids, texts, strict=True):
            self.history.append({"type": "function_call_output", "call_id": id_, "output": text})

    def keep(self, answer: Json) -> list[str]:
        bare, drops = self.chance(0.3), self.chance(0.4)
        for received in answer["output"]:
            if received["type"] == "reasoning" and drops:
                continue
            item = copy.deepcopy(received)
            if bare:
                item.pop("id", None)
                item.pop("status", None)
            if item["type"] == "function_call" and self.chance(0.5):
                item["arguments"] = json.dumps(respell(json.loads(item["arguments"])), separators=(",", ":"))
            self._append(item, received)
        return [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]

    def messages(self, history: Sequence[Json]) -> list[Json]:
        found: list[Json] = []
        turn: list[Json] | None = None
        for item in history:
            kind = item.get("type", "message")
            if kind in ("reasoning", "function_call") or item.get("role") == "assistant":
                if turn is None:
                    turn = []
                    found.append(_spoken(turn))
                turn.append(item)
                found[-1] = _spoken(turn)
                continue
            turn = None
            if kind == "function_call_output":
                found.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            else:
                found.append({"role": item["role"], "content": _text(item["content"])})
        return found

    def edit(self, at: int) -> bool:
        item = self.history[at] = copy.deepcopy(self.history[at])
        self._received.pop(at, None)
        if item.get("type") == "function_call_output":
            item["output"] = "[cleared]"
        elif isinstance(item.get("content"), str):
            item["content"] += " edited"
        elif item.get("content") and item.get("type") != "reasoning":
            item["content"][0]["text"] += " edited"
        else:
            return False
        return True


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _spoken(items: Sequence[Json]) -> Json:
    texts = [_text(item["content"]) for item in items if item.get("role") == "assistant"]
    message: Json = {"role": "assistant", "content": "".join(texts)}
    thoughts = [
        _text(item.get("content") or item.get("summary") or ()) for item in items if item.get("type") == "reasoning"
    ]
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    calls = [item for item in items if item.get("type") == "function_call"]
    if calls:
        message["tool_calls"] = [_call(call["call_id"], call["name"], call["arguments"]) for call in calls]
    return message


AGENTS: Mapping[str, type[Agent]] = {"chat": ChatAgent, "messages": MessagesAgent, "responses": ResponsesAgent}


# ---- words ----------------------------------------------------------------------------------------------------

WORDS = [
    "alpha",
    "beta",
    "",
    "γάμμα",
    "<|im_end|>",
    "</tool_call>",
    "don't",
    "\n\n",
    "stop",
    "42",
    "naïve",
    "日本",
    "🙂",
    '"quoted"',
    "{x}",
    "<think>",
    "tab\there",
]
"""Includes control text: from users and tools it is plain text."""


def words(rng: random.Random, most: int) -> str:
    """Return at most this many words."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, most)))


def runs(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each run of ones."""
    start = None
    for at, value in enumerate([*mask, 0]):
        if value and start is None:
            start = at
        if not value and start is not None:
            yield start, at
            start = None
