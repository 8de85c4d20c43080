"""A hosted model: turns from a server with OpenAI's chat API, in messages. `generate` raises: there are no ids.

1. A call of `turn` is one request. A lost connection, an invalid answer and the statuses 408, 429 and 5xx are retried,
   up to `engine_max_retries` times. A retry waits at least Retry-After. Other statuses raise the server's message.
2. The deadline is `engine_request_timeout`: it covers all attempts and the waits between them.
3. The API key is read from the environment and sent as a bearer token. The key is masked in answers that repeat it."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self
from uuid import uuid4

import anyio
import orjson

from agentrl.chat.messages import (
    REASONING_KEYS,
    ParsedTurn,
    ToolCall,
    ToolSchema,
    arguments_text,
    normalise_messages,
    whole_text,
)
from agentrl.engine.answers import error_kind, error_message, malformed
from agentrl.engine.pause import FixedModel, PauseGate
from agentrl.engine.requests import MAX_BACKOFF, busy_or_broken
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import HttpTransport, Reply, normalise_url
from agentrl.engine.wire import FinishReason, FinishType, Generation, SamplingParams
from agentrl.errors import (
    SECRET,
    ContextOverflow,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
    ModelFailure,
    TemplateError,
)
from agentrl.media import Image, reference_hash
from agentrl.sample import Message
from agentrl.settings import shown

NO_TOKENS: Final = "a hosted model (--engine openai) gives no token ids and no log-probs"
KIND: Final = "hosted_no_tokens"  # kind of the failure of code that asks a hosted model for token ids
_MIN_KEY_LENGTH: Final = 16  # a shorter key (EMPTY) is no secret, and may be a word of an answer
_SENT: Final[tuple[str, ...]] = ("role", "content", "tool_calls", "tool_call_id")


@dataclass(frozen=True, slots=True)
class HostedTurn:
    """One turn of a hosted model."""

    generation: Generation  # the finish reason and the server's token counts; without ids
    parsed: ParsedTurn  # the server's parse; a call whose arguments are no JSON object is broken
    message: Message  # the turn in the form that is sent back to the server


class HostedModel(FixedModel):
    """The model `hosted_model` at `base_url`; an async context manager, safe for concurrent calls."""

    def __init__(self, settings: EngineSettings, transport: HttpTransport | None = None) -> None:
        self.name = settings.hosted_name or ""  # model and address for messages, without secrets
        self.pause_gate = PauseGate()
        self._settings, self._transport = settings, transport or HttpTransport(settings)
        self._url, self._key = normalise_url(settings.base_url or ""), settings.api_key
        self._places = anyio.Semaphore(settings.sglang_server_concurrency)
        self._counts: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._transport.__aexit__(*exc)

    async def check(self) -> None:
        """Request the list of models. A server without a list passes, and so does a slow one. Raises EngineUnreachable:
        no server answers. Raises EngineRejected: the server rejects the key."""
        with anyio.move_on_after(2 * self._settings.engine_connect_timeout):
            try:
                reply = await self._transport.exchange("GET", f"{self._url}/models")
            except EngineUnreachable as error:
                raise EngineUnreachable(f"no server answers at --base-url: {error}", kind=error.kind) from error
            if reply.status == 401:
                raise self._refusal(reply)

    async def turn(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, params: SamplingParams
    ) -> HostedTurn:
        """Return the turn that follows `messages`: the output of `sent`, plus the `message` of earlier turns. Of
        `params` only the API's parameters are sent: temperature, top_p, max_new_tokens, stop and the seed.

        Raises EngineTimeout: the deadline passed. EngineUnreachable: no answer came, even after the retries.
        EngineRejected: the server refused the request, or its answers could not be read. ContextOverflow: the
        conversation does not fit the model's context. ModelFailure: the server's content filter ended the turn."""
        body, seconds = orjson.dumps(self._body(messages, tools, params)), self._settings.engine_request_timeout
        try:
            with self.pause_gate.patience(seconds):
                await self.pause_gate.wait_open()
                async with self._places:
                    return await self._answer(body)
        except TimeoutError:
            limit = f"{seconds:g} s (--engine-request-timeout)"
            raise EngineTimeout(f"the hosted model {self.name} gave no turn within {limit}") from None

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, **_: Any) -> Generation:
        """Raise EngineRejected: a hosted model takes no token ids."""
        raise EngineRejected(f"{NO_TOKENS}, and a prompt of {len(input_ids)} ids was asked for", kind=KIND)

    def figures(self) -> dict[str, float]:
        """Return metrics since the last call: failed attempts, and the tokens that the server counted."""
        counts, self._counts = self._counts, Counter()
        names = {"engines/failed": "failed"} | {f"hosted/{n}": n for n in ("prompt_tokens", "completion_tokens")}
        return {name: float(counts[count]) for name, count in names.items()}

    def _body(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, params: SamplingParams
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self._settings.hosted_model, "messages": messages, "tools": tools or None}
        fields |= {"temperature": params.temperature, "top_p": None if params.top_p == 1 else params.top_p}
        fields |= {"max_tokens": params.max_new_tokens, "stop": params.stop or None, "seed": params.sampling_seed}
        return {name: value for name, value in (fields | self._settings.hosted_options).items() if value is not None}

    async def _answer(self, body: bytes) -> HostedTurn:
        """Return the turn, after up to `engine_max_retries` retries. The caller sets the deadline."""
        backoff, left = self._settings.engine_retry_backoff, self._settings.engine_max_retries
        while True:
            asked = 0.0
            try:
                reply = await self._transport.exchange("POST", f"{self._url}/chat/completions", body)
                asked = reply.retry_after
                return self._read(reply)
            except (EngineUnreachable, EngineRejected) as error:
                if isinstance(error, EngineRejected) and not busy_or_broken(error.status):
                    raise
                self._counts["failed"] += 1
                if not left:
                    raise
                # The random factor spreads the retries of requests that were refused together.
                seconds = max(backoff, asked) * random.uniform(1.0, 1.2)
                if anyio.current_time() + seconds > anyio.current_effective_deadline():
                    due = f"the next attempt is due in {seconds:.0f} s, after the deadline (--engine-request-timeout)"
                    raise EngineTimeout(f"{error}; {due}") from error
            await anyio.sleep(seconds)
            backoff, left = min(2 * backoff, MAX_BACKOFF), left - 1

    def _read(self, reply: Reply) -> HostedTurn:
        if self._key and (len(self._key) >= _MIN_KEY_LENGTH or reply.status != 200):
            reply = reply._replace(body=reply.body.replace(self._key.encode(), SECRET.encode()))
        if reply.status != 200:
            raise self._refusal(reply)
        turn = read_turn(reply.body)
        meta = turn.generation.meta_info
        self._counts.update({name: meta[name] for name in ("prompt_tokens", "completion_tokens")})
        return turn

    def _refusal(self, reply: Reply) -> EngineRejected | ContextOverflow:
        message = error_message(reply.body)
        there, variable = "set" if self._key else "not set", self._settings.hosted_api_key_env
        hints = {
            401: f"; the key is read from the environment variable {variable} (--hosted-api-key-env), which is {there}",
            404: "; --base-url usually ends in /v1, and --hosted-model names a model that the server has",
        }
        kind, said = error_kind(reply.status, message), f"{shown(self._url)} answered {reply.status}: {message}"
        said += hints.get(reply.status, "")
        if kind == "context_overflow" or b'"context_length_exceeded"' in reply.body:  # the API's code; messages differ
            return ContextOverflow(said, kind="engine_context_overflow")
        return EngineRejected(said, status=reply.status, kind=kind)


def sent(messages: Sequence[Mapping[str, Any]], images: Mapping[str, Image]) -> list[Message]:
    """Return messages in the API's form: only fields that the API knows, arguments as JSON text, and images in place of
    references. Raises TemplateError: an item is no chat message."""
    found = [{name: message[name] for name in _SENT if name in message} for message in normalise_messages(messages)]
    for message in found:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_call(call, call.get("id", "")).to_message() for call in calls]
        if isinstance(parts := message["content"], list):
            message["content"] = [image_or_text(part, images) for part in parts]
    return found


def image_or_text(part: Message, images: Mapping[str, Image]) -> Message:
    """Return a part of a content, with an image itself in place of its reference."""
    name = reference_hash(part)
    return part if name is None else {"type": "image_url", "image_url": {"url": images[name].url}}


def read_turn(raw: bytes) -> HostedTurn:
    """Read a chat completion. Raises EngineRejected, kind `malformed_answer`; ModelFailure, kind `content_filter`."""
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        malformed("the answer", f"JSON ({error})", raw)
    match answer:
        case {"choices": [{"message": dict(message), **choice}, *_]}:
            pass
        case _:
            malformed("the answer", "a chat completion", answer)
    try:
        (said,) = normalise_messages([{**message, "role": "assistant"}])
    except (TemplateError, TypeError) as error:
        malformed("choices[0].message", f"an assistant's message ({error})", message)
    finish: FinishType = "length" if choice.get("finish_reason") == "length" else "stop"
    if choice.get("finish_reason") == "content_filter":
        raise ModelFailure("the server's content filter ended the turn", kind="content_filter")
    calls = [_call(call, call.get("id") or uuid4().hex[:9]) for call in said.get("tool_calls", ())]
    broken = tuple(f"{call.name} {call.arguments}" for call in calls if not isinstance(call.arguments, dict))
    kept = tuple(call for call in calls if isinstance(call.arguments, dict))
    content = (said["content"] or str(said.get("refusal", ""))).strip()
    parsed = ParsedTurn(content, said.get("reasoning_content"), kept, broken)
    usage = answer.get("usage") if isinstance(answer.get("usage"), dict) else {}
    meta = {
        name: n if type(n := usage.get(name)) is int and n > 0 else 0 for name in ("prompt_tokens", "completion_tokens")
    }
    # A broken call is sent back as text: a server may refuse the call, and no tool result would answer it.
    again: Message = {"role": "assistant", "content": "\n".join(filter(None, (content, *broken)))}
    if kept:
        again |= {"content": again["content"] or None, "tool_calls": [call.to_message() for call in kept]}
    again |= {name: whole_text(message[name]) for name in REASONING_KEYS if isinstance(message.get(name), str)}
    generation = Generation([], [], content, FinishReason(finish), "", (), meta["prompt_tokens"], 0, meta)
    return HostedTurn(generation, parsed, again)


def _call(call: Mapping[str, Any], name: str) -> ToolCall:
    """Return a call in the normal form, with the id `name`."""
    function = call["function"]
    arguments = function["arguments"]
    return ToolCall(name, function["name"], arguments if isinstance(arguments, dict) else arguments_text(arguments))
