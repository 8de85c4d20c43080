"""OpenAI's responses."""

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.chat.messages import ToolCall, arguments_text
from agentrl.gateway.contracts import AgentRequest, AgentTurn, Body, Memo, Refusal
from agentrl.gateway.live import TEXTS, LiveTurn, TextName, cut
from agentrl.gateway.wires.common import BodyFields, Fields, OpenAIErrors, agent_request, event, joined, schema
from agentrl.sample import Message

_WRITTEN = {"message": "content", "reasoning": "content", "function_call": "arguments", "custom_tool_call": "input"}
"""The field of an item that the model writes: a list of one part, or text."""
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
_TEXTS |= {"custom_tool_call": "custom_tool_call_input"}
"""The events that extend this field's text."""
_RESPONSE: Body = {"object": "response", "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None}
_BEGUN: Body = {"status": "in_progress", "output": [], "incomplete_details": None, "usage": None}
_RESPONSE |= {**_BEGUN, "instructions": None, "metadata": {}}


class ResponsesWire(OpenAIErrors):
    """The wire format of `POST /responses`. Reasoning is a separate item with its whole text, because some clients send
    an item with only a summary back as the assistant's text."""

    def read(self, body: Body, headers: Mapping[str, str], memo: Memo | None = None) -> AgentRequest:
        fields = BodyFields(body, memo)
        instructions = fields.get("instructions", str)
        system: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
        tools = fields.usable("tools", _tools)
        more: Body = {"max_tokens": fields.positive("max_output_tokens"), "instructions": len(system)}
        more["previous"] = (fields.get("previous_response_id", str) or "").removeprefix("resp_")
        more["stored"] = fields.get("store", bool) is not False
        more["call_forms"] = {tool["function"]["name"]: form for tool, form in tools}
        if not (messages := _messages(fields)):
            raise fields.refusal("input", "expected text or items")
        return agent_request(fields, headers, [*system, *messages], [tool for tool, _ in tools], **more)

    def answer(self, request: AgentRequest, turn: AgentTurn) -> Body:
        cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        # Codex reads `incomplete` as a broken stream and asks again, so only the agent's own limit is reported.
        reached = turn.finish == "length" and request.max_tokens and turn.completion_tokens >= request.max_tokens
        status = cut if reached else {"status": "completed"}
        head = {"id": f"resp_{turn.id}", "created_at": turn.created, "model": request.model, **status}
        usage = {"input_tokens": turn.prompt_tokens, "output_tokens": turn.completion_tokens}
        usage["total_tokens"] = turn.prompt_tokens + turn.completion_tokens
        cached = {"input_tokens_details": {"cached_tokens": turn.cached_tokens, "cache_write_tokens": 0}}
        details = {**cached, "output_tokens_details": {"reasoning_tokens": 0}}
        return {**_RESPONSE, **head, "output": list(_items(request, turn)), "usage": {**usage, **details}}

    def events(self, request: AgentRequest, live: LiveTurn) -> Iterator[bytes]:
        yield _event(live, "created", response=self._begun(request, live))
        while not live.begun:
            yield b""
        yield self.keep_alive(request, live)
        for kind, fields in _steps(request, live):
            yield _event(live, kind, **fields) if kind else b""
        whole = self.answer(request, live.turn)
        yield _event(live, whole["status"], response=whole)

    def keep_alive(self, request: AgentRequest, live: LiveTurn) -> bytes:
        """Return an event: Codex ends a stream without events for five minutes, and comments do not count."""
        return _event(live, "in_progress", response=self._begun(request, live))

    def error_event(self, refusal: Refusal, request: AgentRequest, live: LiveTurn) -> bytes:
        error = {"code": self.error(refusal)["error"]["code"], "message": str(refusal)}
        return _event(live, "failed", response={**self._begun(request, live), "status": "failed", "error": error})

    def _begun(self, request: AgentRequest, live: LiveTurn) -> Body:
        return {**self.answer(request, live.turn), **_BEGUN}


def _messages(fields: BodyFields) -> list[Message]:
    if isinstance(given := fields.get("input", object), str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    thought = ""
    for kind, read in fields.once("input", _read_item):
        if kind == "reference":
            if read not in fields.memo.items:
                raise Refusal(f"input: the item {read!r:.80} is not known in this session", "not_found")
            kind, read = fields.memo.items[read]
        match kind:
            case "thought":
                thought = read
                continue
            case "call" if messages and messages[-1]["role"] == "assistant":
                messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), read]}
            case "call":
                messages.append({"role": "assistant", "content": "", "tool_calls": [read]})
            case _:
                messages.append(read)
        if thought and messages[-1]["role"] == "assistant":
            messages[-1] = {**messages[-1], "reasoning_content": thought}
        thought = ""
    return messages


def _read_item(item: Fields) -> Iterator[tuple[str, Any]]:
    """Yield the kind of an item, and a message, a call, a text or an id."""
    match kind := item.get("type", str) or "message":
        case "message":
            shown = item.content if (role := item.role("system", "user", "assistant")) == "user" else item.text
            yield kind, {"role": role, "content": shown("content")}
        case "function_call" | "custom_tool_call":
            yield "call", _call(item, kind)
        case "function_call_output" | "custom_tool_call_output":
            output = item.content("output")
            yield "output", {"role": "tool", "tool_call_id": item.need("call_id", str), "content": output}
        case "reasoning":
            texts = (joined(part.need("text", str) for part in item.each(name)) for name in ("content", "summary"))
            yield "thought", next(filter(None, texts), "")
        case "item_reference":
            yield "reference", item.need("id", str)
        case _:
            raise item.refusal("type", f"{kind!r:.80} is not supported; send messages, calls and their outputs")


def _call(item: Fields, kind: str) -> Body:
    written = item.need(_WRITTEN[kind], str)
    name = _shown(item.get("namespace", str), item.need("name", str))
    return ToolCall(item.need("call_id", str), name, {"input": written} if kind[0] == "c" else written).to_message()


def _shown(namespace: str | None, name: str) -> str:
    """Return the tool name that the model sees."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def _tools(outer: Fields) -> Iterator[tuple[Body, Body] | str]:
    """Yield a tool's schema and the fields of an item that calls it, or the kind of a tool that is left out. A
    namespace yields its tools. A custom tool is a function with one text argument."""
    namespace = outer.need("name", str) if outer.need("type", str) == "namespace" else None
    for tool in outer.each("tools") if namespace else [outer]:
        parameters = tool.get("parameters", dict)
        match kind := tool.need("type", str):
            case "function":
                form = {"type": "function_call"}
            case "custom":
                form = {"type": "custom_tool_call"}
                grammar = tool.inner("format").get("definition", str)
                told = {"description": f"Text of this grammar:\n{grammar}"} if grammar else {}
                text = {"type": "string", **told}
                parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
            case _:
                yield kind
                continue
        name = tool.need("name", str)
        form |= {"name": name} | ({"namespace": namespace} if namespace else {})
        yield schema(tool, parameters, _shown(namespace, name)), form


def _items(request: AgentRequest, turn: AgentTurn) -> Iterator[Body]:
    parsed = turn.parsed
    if parsed.reasoning:
        yield _text_item("reasoning", turn, parsed.reasoning)
    if parsed.content or not parsed.tool_calls:
        yield _text_item("content", turn, parsed.content)
    yield from _calls(request, turn)


def items_by_id(request: AgentRequest, turn: AgentTurn) -> dict[str, Any]:
    """Return the items of an answer for `Memo.items`."""
    return {item["id"]: next(_read_item(Fields(item))) for item in _items(request, turn)}


def _text_item(name: TextName, turn: AgentTurn, text: str) -> Body:
    if name == "reasoning":
        thought = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "id": f"rs_{turn.id}", "summary": [], "content": thought, "status": "completed"}
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    status = "incomplete" if turn.finish == "length" else "completed"
    return {"type": "message", "id": f"msg_{turn.id}", "role": "assistant", "status": status, "content": [part]}


def _calls(request: AgentRequest, turn: AgentTurn) -> Iterator[Body]:
    for index, call in enumerate(turn.parsed.tool_calls):
        form = request.call_forms.get(call.name) or {"type": "function_call", "name": call.name}
        match form["type"], call.arguments:
            case "custom_tool_call", {"input": str(written), **rest} if not rest:
                pass
            case _:
                written = arguments_text(call.arguments)
        identity = {"id": f"fc_{turn.id}_{index}", "call_id": call.id, "status": "completed"}
        yield {**form, **identity, _WRITTEN[form["type"]]: written}


def _steps(request: AgentRequest, live: LiveTurn) -> Iterator[tuple[str, Body]]:
    """Yield the events of the items. The kind "" means to wait."""
    index = 0
    for name in TEXTS:
        begun = False
        for piece in live.pieces(name):
            if piece and not begun:
                begun = True
                yield from _opened(_text_item(name, live.turn, ""), index)
            yield _grown(_text_item(name, live.turn, ""), index, piece) if piece else ("", {})
        if not begun and (name == "reasoning" or live.turn.parsed.tool_calls):
            continue
        item = _text_item(name, live.turn, live.text(name))
        if not begun:
            yield from _opened(item, index)
        yield from _closed(item, index)
        index += 1
    for at, item in enumerate(_calls(request, live.turn), index):
        yield from _opened(item, at)
        yield from (_grown(item, at, piece) for piece in cut(item[_WRITTEN[item["type"]]]))
        yield from _closed(item, at)


def _at(item: Body, index: int) -> Body:
    return {"item_id": item["id"], "output_index": index} | ({"content_index": 0} if "content" in item else {})


def _opened(item: Body, index: int) -> Iterator[tuple[str, Body]]:
    parts = "content" in item
    begun = {**item, _WRITTEN[item["type"]]: [] if parts else "", "status": "in_progress"}
    yield "output_item.added", {"output_index": index, "item": begun}
    if parts:
        yield "content_part.added", {**_at(item, index), "part": {**item["content"][0], "text": ""}}


def _grown(item: Body, index: int, piece: str) -> tuple[str, Body]:
    besides: Body = {"logprobs": []} if item["type"] == "message" else {}
    return f"{_TEXTS[item['type']]}.delta", {**_at(item, index), **besides, "delta": piece}


def _closed(item: Body, index: int) -> Iterator[tuple[str, Body]]:
    field, at, parts = _WRITTEN[item["type"]], _at(item, index), item.get("content")
    besides: Body = {"logprobs": []} if item["type"] == "message" else {}
    done = {"text": parts[0]["text"]} if parts else {field: item[field]}
    yield f"{_TEXTS[item['type']]}.done", {**at, **besides, **done}
    if parts:
        yield "content_part.done", {**at, "part": parts[0]}
    yield "output_item.done", {"output_index": index, "item": item}


def _event(live: LiveTurn, kind: str, **fields: Any) -> bytes:
    name = f"response.{kind}"
    return event({"type": name, "sequence_number": next(live.numbers), **fields}, name)
