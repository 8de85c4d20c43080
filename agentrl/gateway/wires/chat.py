"""OpenAI's chat completions."""

from collections.abc import Iterator, Mapping

from agentrl.chat.messages import REASONING_KEYS, ToolCall
from agentrl.gateway.contracts import AgentRequest, AgentTurn, Body, Memo, Refusal
from agentrl.gateway.live import LiveTurn
from agentrl.gateway.wires.common import BodyFields, Fields, OpenAIErrors, agent_request, event, schema
from agentrl.sample import Message

_FINISH = {"stop": "stop", "calls": "tool_calls", "length": "length"}


class ChatWire(OpenAIErrors):
    """The wire format of `POST /chat/completions`. Reasoning is `reasoning_content`."""

    def read(self, body: Body, headers: Mapping[str, str], memo: Memo | None = None) -> AgentRequest:
        fields = BodyFields(body, memo)
        messages = fields.once("messages", _messages)
        limits = [fields.positive(name) for name in ("max_completion_tokens", "max_tokens")]
        more = {"max_tokens": next(filter(None, limits), None), "stop": fields.stops("stop")}
        more["usage"] = fields.inner("stream_options").get("include_usage", bool) or False
        return agent_request(fields, headers, messages, fields.usable("tools", _tools), **more)

    def answer(self, request: AgentRequest, turn: AgentTurn) -> Body:
        head = {"id": f"chatcmpl-{turn.id}", "created": turn.created, "model": request.model}
        choice = {"message": turn.parsed.to_message(), "finish_reason": _FINISH[turn.finish], "logprobs": None}
        usage: Body = {"prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.completion_tokens}
        usage["total_tokens"] = turn.prompt_tokens + turn.completion_tokens
        usage["prompt_tokens_details"] = {"cached_tokens": turn.cached_tokens}
        return {**head, "object": "chat.completion", "choices": [{"index": 0, **choice}], "usage": usage}

    def events(self, request: AgentRequest, live: LiveTurn) -> Iterator[bytes]:
        while not live.begun:
            yield b""
        head = self.answer(request, live.turn) | {"object": "chat.completion.chunk", "usage": None}
        head = {name: head[name] for name in head if name != "choices" and (name != "usage" or request.usage)}
        for delta in _deltas(live):
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            yield event({**head, "choices": [choice]}) if delta else b""
        whole = self.answer(request, live.turn)
        end = {"index": 0, "delta": {}, "finish_reason": whole["choices"][0]["finish_reason"]}
        yield event({**head, "choices": [end]})
        if request.usage:
            yield event({**head, "choices": [], "usage": whole["usage"]})
        yield b"data: [DONE]\n\n"

    def error_event(self, refusal: Refusal, request: AgentRequest, live: LiveTurn) -> bytes:
        return event(self.error(refusal))


def _messages(given: Fields) -> Iterator[Message]:
    role = given.role("system", "user", "assistant", "tool")
    shown = given.content if role in ("user", "tool") else given.text
    message: Message = {"role": role, "content": shown("content")}
    if role == "tool":
        message["tool_call_id"] = given.need("tool_call_id", str)
    if role == "assistant":
        message["content"] = message["content"] or given.get("refusal", str) or ""
        if reasoning := next((text for key in REASONING_KEYS if (text := given.get(key, str))), ""):
            message["reasoning_content"] = reasoning
        if calls := [_call(call) for call in given.each("tool_calls")]:
            message["tool_calls"] = calls
    yield message


def _call(given: Fields) -> Body:
    if (given.get("type", str) or "function") != "function":
        raise given.refusal("type", "only calls of functions are supported")
    function = given.inner("function")
    arguments = function.get("arguments", object) or {}
    if not isinstance(arguments, str | dict):
        raise function.refusal("arguments", "expected JSON text")
    return ToolCall(given.need("id", str), function.need("name", str), arguments).to_message()


def _tools(tool: Fields) -> Iterator[Body | str]:
    function = tool.inner("function")
    known = (kind := tool.need("type", str)) == "function"
    yield schema(function, function.get("parameters", dict)) if known else kind


def _deltas(live: LiveTurn) -> Iterator[Body]:
    yield {"role": "assistant", "content": ""}
    yield from ({"reasoning_content": piece} if piece else {} for piece in live.pieces("reasoning"))
    yield from ({"content": piece} if piece else {} for piece in live.pieces("content"))
    for index, call in enumerate(live.turn.parsed.tool_calls):
        yield {"tool_calls": [{"index": index, **call.to_message()}]}
