"""Anthropic's messages. `read` also serves `count_tokens`, whose requests have the same fields."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from agentrl.chat.messages import ToolCall, arguments_text
from agentrl.gateway.contracts import AgentRequest, AgentTurn, Body, Memo, Refusal
from agentrl.gateway.live import LiveTurn, TextName, cut
from agentrl.gateway.wires.common import BodyFields, Fields, agent_request, content_of, event, joined, schema
from agentrl.sample import Message

_STOP = {"stop": "end_turn", "calls": "tool_use", "length": "max_tokens"}
_ERRORS = {"not_found": "not_found_error", "limit": "rate_limit_error", "overloaded": "overloaded_error"}
_ERRORS |= {"invalid": "invalid_request_error", "context": "invalid_request_error", "failed": "api_error"}
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
_SIGNED = {"signature": "agentrl"}
"""Clients keep a block of thinking in the history only if it is signed."""


class MessagesWire:
    """The wire format of `POST /messages`. Reasoning is a block of thinking, if the agent asked for it."""

    def read(self, body: Body, headers: Mapping[str, str], memo: Memo | None = None) -> AgentRequest:
        fields = BodyFields(body, memo)
        # The billing line differs from request to request, so it is removed.
        system = joined(_BILLING.sub("", block.part_text()) for block in fields.parts("system"))
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        messages += fields.once("messages", _messages)
        more: Body = {"max_tokens": fields.positive("max_tokens"), "stop": fields.stops("stop_sequences")}
        more["thinking"] = fields.inner("thinking").get("type", str) in ("enabled", "adaptive")
        return agent_request(fields, headers, messages, fields.usable("tools", _tools), **more)

    def answer(self, request: AgentRequest, turn: AgentTurn) -> Body:
        head = {"id": f"msg_{turn.id}", "type": "message", "role": "assistant", "model": request.model}
        reason = "stop_sequence" if turn.stop and turn.finish == "stop" else _STOP[turn.finish]
        stop = {"stop_reason": reason, "stop_sequence": turn.stop}
        usage = {"input_tokens": turn.prompt_tokens - turn.cached_tokens, "cache_creation_input_tokens": 0}
        usage |= {"cache_read_input_tokens": turn.cached_tokens, "output_tokens": turn.completion_tokens}
        return {**head, "content": list(_blocks(request, turn)), **stop, "usage": usage}

    def events(self, request: AgentRequest, live: LiveTurn) -> Iterator[bytes]:
        while not live.begun:
            yield b""
        begun = self.answer(request, live.turn)
        usage = {**begun["usage"], "output_tokens": 0}
        yield _event("message_start", message={**begun, "content": [], "stop_reason": None, "usage": usage})
        index = 0
        for kind, fields in _steps(request, live):
            yield _event(f"content_block_{kind}", index=index, **fields) if kind else b""
            index += kind == "stop"
        whole = self.answer(request, live.turn)
        stop = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=stop, usage=whole["usage"])
        yield _event("message_stop")

    def keep_alive(self, request: AgentRequest, live: LiveTurn) -> bytes:
        return _event("ping")

    def status(self, refusal: Refusal) -> int:
        return 529 if refusal.kind == "overloaded" else refusal.status

    def error(self, refusal: Refusal) -> Body:
        return {"type": "error", "error": {"type": _ERRORS[refusal.kind], "message": str(refusal)}}

    def error_event(self, refusal: Refusal, request: AgentRequest, live: LiveTurn) -> bytes:
        return event(self.error(refusal), "error")


def _messages(given: Fields) -> Iterator[Message]:
    """Yield the messages of one message in Anthropic's form: tool results first, then the rest."""
    role = given.role("system", "user", "assistant")
    parts, thoughts, calls, results = list[Fields](), list[str](), list[Body](), 0
    for block in given.parts("content"):
        match role, block.need("type", str):
            case "user", "tool_result":
                results += 1
                id_ = block.need("tool_use_id", str)
                yield {"role": "tool", "tool_call_id": id_, "content": block.content("content")}
            case "assistant", "tool_use":
                call = ToolCall(block.need("id", str), block.need("name", str), block.need("input", dict))
                calls.append(call.to_message())
            case "assistant", "thinking" | "redacted_thinking":
                thoughts.append(block.get("thinking", str) or "")
            case _:
                parts.append(block)
    if parts or not results:
        thought = {"reasoning_content": joined(thoughts)} if any(thoughts) else {}
        content = content_of(parts) if role == "user" else joined(part.part_text() for part in parts)
        yield {"role": role, "content": content, **thought, **({"tool_calls": calls} if calls else {})}


def _tools(tool: Fields) -> Iterator[Body | str]:
    known = (kind := tool.get("type", str) or "custom") == "custom"
    yield schema(tool, tool.need("input_schema", dict)) if known else kind


def _blocks(request: AgentRequest, turn: AgentTurn) -> Iterator[Body]:
    parsed = turn.parsed
    if parsed.reasoning and request.thinking:
        yield {"type": "thinking", "thinking": parsed.reasoning, **_SIGNED}
    if parsed.content or not parsed.tool_calls:
        yield {"type": "text", "text": parsed.content}
    for call in parsed.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}


def _input(arguments: dict[str, Any] | str) -> Any:
    """Return arguments as an object. Whole numbers that orjson cannot encode become floats."""
    if isinstance(arguments, str):
        return {"input": arguments}
    return json.loads(arguments_text(arguments), parse_int=_whole)


def _whole(text: str) -> float:
    return int(text) if len(text) <= 20 and -(2**63) <= int(text) < 2**64 else float(text)


def _steps(request: AgentRequest, live: LiveTurn) -> Iterator[tuple[str, Body]]:
    """Yield each event of the blocks: its kind ("" means to wait), and its fields without the index."""
    if request.thinking:
        yield from _written(live, "thinking", "reasoning")
    yield from _written(live, "text", "content")
    for block in _blocks(request, live.turn):
        if block["type"] == "tool_use":
            yield "start", {"content_block": {**block, "input": {}}}
            for piece in cut(orjson.dumps(block["input"]).decode()):
                yield "delta", {"delta": {"type": "input_json_delta", "partial_json": piece}}
            yield "stop", {}


def _written(live: LiveTurn, kind: str, name: TextName) -> Iterator[tuple[str, Body]]:
    """Yield the events of a block of text. The block may be empty if the turn has no calls."""
    signed = kind == "thinking"
    start = {"content_block": {"type": kind, kind: "", **({"signature": ""} if signed else {})}}
    begun = False
    for piece in live.pieces(name):
        if piece and not begun:
            begun = True
            yield "start", start
        yield ("delta", {"delta": {"type": f"{kind}_delta", kind: piece}}) if piece else ("", {})
    if not begun and (signed or live.turn.parsed.tool_calls):
        return
    if not begun:
        yield "start", start
    if signed:
        yield "delta", {"delta": {"type": "signature_delta", **_SIGNED}}
    yield "stop", {}


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
