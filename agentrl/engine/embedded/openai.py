"""POST /v1/chat/completions and /v1/completions, translated to and from /generate.

1. The body becomes a /generate body, so both speak to one engine path and are checked by the same rules; errors have the
   OpenAI form.
2. Messages are rendered and turns parsed by `agentrl.chat`, loaded at the first chat request: the same templates and
   parsers as in training.
3. A turn is parsed where there are tools, or the template has reasoning tags. The ids of its calls go on from those in
   the messages, so that they are those of one call in a whole conversation.
"""

import re
import threading
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import orjson
from starlette.requests import Request
from starlette.responses import Response

from agentrl.engine.embedded.errors import RequestError, invalid_body, openai_error
from agentrl.engine.embedded.forced import chosen, held_to
from agentrl.engine.embedded.generate import event_stream, final_answers, read
from agentrl.engine.embedded.grammar import Grammars
from agentrl.engine.embedded.http import Json, field, object_body
from agentrl.engine.embedded.openai_answers import chat_choice, chat_log_probs, completion_choice, usage
from agentrl.engine.embedded.openai_streams import Body, Entries, chat_entries, settled, stream, text_entries
from agentrl.engine.embedded.request import GenerateRequest
from agentrl.engine.embedded.service import Options, Service
from agentrl.errors import SettingsError, TemplateError
from agentrl.serving import aside

if TYPE_CHECKING:
    from agentrl.chat import Chat

Choice = Callable[[int, Body], Body]
"""One entry of `choices`, from its index and the answer of POST /generate."""
_SAME_NAME_TABLE = """
    temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty n stop stop_token_ids stop_regex
    logit_bias ignore_eos no_stop_trim skip_special_tokens json_schema regex ebnf structural_tag
"""
SAME_NAME = _SAME_NAME_TABLE.split()
RENAMED = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}
MOST_CHATS = 8
"""How many sets of `chat_template_kwargs` are kept ready."""


class Chats:
    """The chat template and parsers, loaded when first needed; one for each set of `chat_template_kwargs`."""

    def __init__(self, service: Service) -> None:
        self._load = lru_cache(MOST_CHATS)(partial(_load_chat, service.options))
        self._lock = threading.Lock()

    def get(self, kwargs: dict[str, Any]) -> "Chat":
        """Blocks while loading (call it from a worker thread). Raises `RequestError` when there is no usable template."""
        with self._lock:
            return self._load(orjson.dumps(kwargs, option=orjson.OPT_SORT_KEYS))


def _load_chat(options: Options, kwargs: bytes) -> "Chat":
    from agentrl.chat import Chat

    try:
        return Chat.load(
            options.model_path,
            chat_template=options.chat_template,
            template_kwargs=orjson.loads(kwargs),
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
            trust_remote_code=options.trust_remote_code,
        )
    except (TemplateError, SettingsError) as error:
        raise openai_error(str(error)) from error


async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await object_body(request)
    if "messages" not in body:
        raise invalid_body("missing", "Field required", "messages")
    messages: list[dict[str, Any]] = field(body, "messages", list)
    if not messages:
        raise openai_error("Messages cannot be empty.")
    tools = chosen(field(body, "tools", list, []), body.get("tool_choice"))
    kwargs: dict[str, Any] = field(body, "chat_template_kwargs", dict, {})
    chats: Chats = request.app.state.chats
    chat = await anyio.to_thread.run_sync(chats.get, kwargs)
    ids = await aside(request, _render, chat, messages, tools)
    held = await anyio.to_thread.run_sync(_held_to, chat, service.grammars, body, tools)
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    parser = chat.turn_parser if tools else chat.turn_parser.without_calls()
    parsed = parser if tools or parser.reads else None
    top = field(body, "top_logprobs", int, 0)
    translated = _translate(body, ids, limit, top=top, logprobs=bool(body.get("logprobs")))
    if both := held.keys() & translated["sampling_params"].keys():
        raise openai_error(f"Only one of {both.pop()}, response_format and tool_choice can be set.")
    translated["sampling_params"] |= held
    if parsed is not None:
        translated["sampling_params"]["skip_special_tokens"] = False
    if body.get("return_meta_info"):
        translated["return_logprob"] = True
    generate = await _parse(request, translated)
    form: Body = {"body": body, "vocab": service.vocab}
    choice = partial(chat_choice, **form, parser=parsed, tools=tools, first_call=_next_call(messages))
    sure = partial(settled, parsed) if parsed is not None else _all_content
    entries = partial(chat_entries, choice=choice, log_probs=partial(chat_log_probs, **form), read=sure)
    return await _respond(request, body, generate, "chat.completion", choice, entries)


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await object_body(request)
    if body.get("prompt") is None:
        raise invalid_body("missing", "Field required", "prompt")
    if body.get("suffix"):
        raise openai_error("suffix is not supported by the embedded engine.")
    top = field(body, "logprobs", int, 0)
    limit = body.get("max_tokens", 16)
    translated = _translate(body, body["prompt"], limit, top=top, logprobs=body.get("logprobs") is not None)
    if body.get("echo"):
        translated["logprob_start_len"] = 0
    generate = await _parse(request, translated)
    choice = partial(completion_choice, body=body, vocab=service.vocab)
    return await _respond(request, body, generate, "text_completion", choice, partial(text_entries, choice=choice))


async def _respond(
    request: Request, body: Body, generate: GenerateRequest, kind: str, choice: Choice, entries: Entries
) -> Response:
    service: Service = request.app.state.service
    head = {
        "id": generate.sequences[0].front_rid,
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model") or "default",
    }
    if generate.stream:
        head["object"] = kind.replace("chat.completion", "chat.completion.chunk")
        options: dict[str, Any] = field(body, "stream_options", dict, {})
        count = field(options, "include_usage", bool, False)
        return event_stream(stream(partial(service.start, generate), head, entries, count=count))
    answers = await final_answers(request, service, generate)
    return Json({**head, "choices": [choice(i, a) for i, a in enumerate(answers)], **usage(answers)})


# -- in ----------------------------------------------------------------------------------------------------------


def _render(chat: "Chat", messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
    try:
        return chat.render_ids(messages, tools)
    except (TemplateError, TypeError, AttributeError) as error:
        raise openai_error(f"messages or tools: {error}") from error


def _held_to(chat: "Chat", grammars: Grammars, body: Body, tools: list[Any]) -> dict[str, str]:
    try:
        return held_to(chat, grammars, body, tools)
    except (TypeError, KeyError, AttributeError) as error:
        raise openai_error(f"response_format or tools: no JSON schema ({type(error).__name__}: {error}).") from error


def _translate(body: dict[str, Any], prompt: Any, limit: Any, *, top: int, logprobs: bool) -> dict[str, Any]:
    """The /generate body that asks for the same thing."""
    params = {name: body[name] for name in SAME_NAME if body.get(name) is not None}
    params |= {ours: body[name] for name, ours in RENAMED.items() if body.get(name) is not None}
    params["max_new_tokens"] = limit
    textual = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str))
    return {
        "text" if textual else "input_ids": prompt,
        "sampling_params": params,
        "return_logprob": logprobs,
        "top_logprobs_num": top,
        "stream": body.get("stream"),
        "rid": body.get("rid"),
        "lora_path": body.get("lora_path"),
        "return_prompt_token_ids": True,
    }


async def _parse(request: Request, translated: dict[str, Any]) -> GenerateRequest:
    try:
        return await read(request, request.app.state.service, translated)
    except RequestError as error:
        raise openai_error(str(error), status=error.status) from error


def _all_content(text: str) -> tuple[str, str]:
    return "", text


def _next_call(messages: list[dict[str, Any]]) -> int:
    """The number behind those in the ids of earlier calls."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    found = (re.fullmatch(r"call(\d{5,9})", str(call.get("id"))) for call in calls)
    return max((int(match[1]) for match in found if match), default=0) + 1
