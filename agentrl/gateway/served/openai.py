"""POST /v1/chat/completions and /v1/completions, translated to and from /generate. Both use /generate's path and rules;
errors have the OpenAI form. `agentrl.chat` renders messages and parses turns, as in training. Turns are parsed if there
are tools or reasoning tags."""

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from agentrl.chat.messages import normalise_messages
from agentrl.engine.embedded.generate import event_stream, failure, final_answers, read
from agentrl.engine.embedded.request import GenerateRequest
from agentrl.engine.embedded.service import EngineService
from agentrl.engine.images import ImageInputs
from agentrl.engine.request_sampling import RequestSampling
from agentrl.errors import MediaError, TemplateError
from agentrl.gateway.contracts import Body
from agentrl.gateway.live import hold_back
from agentrl.gateway.served.answers import Answers, ChatAnswers, Sent, TextAnswers, usage
from agentrl.gateway.served.structured_output import chosen, required_output
from agentrl.serving.http import Handler, Json, RequestError, field, invalid_body, object_body, openai_error
from agentrl.serving.server import aside


async def chat_completions(request: Request) -> Response:
    service: EngineService = request.app.state.service
    body = await object_body(request)
    messages: list[Body] = field(body, "messages", list)
    if not messages:
        raise openai_error("Messages cannot be empty.")
    tools = chosen(field(body, "tools", list, []), body.get("tool_choice"))
    chat = await to_thread.run_sync(service.chat, field(body, "chat_template_kwargs", dict, {}))
    with _blamed("messages or tools"):
        shown, images = await aside(request, chat.take_images, messages, {})
        ids = await aside(request, chat.render_ids, shown, tools)
        seen = ImageInputs.of(images, chat.image_spans(ids, normalise_messages(shown)))
    parser = chat.parser_after(ids) if tools else chat.parser_after(ids).without_calls()
    with _blamed("response_format or tools have no JSON schema"):
        forced = await to_thread.run_sync(required_output, chat, parser, service.grammars, body, tools)
    newer = body.get("max_completion_tokens")
    limit = body.get("max_tokens") if newer is None else newer
    parsed = parser if tools or parser.reads else None
    top = field(body, "top_logprobs", int, 0)
    translated = _translate(body, ids, limit, top=top, logprobs=bool(body.get("logprobs")))
    if seen is not None:
        folded, fields = seen.fields(ids, reads_spans=True)
        translated |= {**fields, "input_ids": folded}
    if both := forced.keys() & translated["sampling_params"].keys():
        raise openai_error(f"Only one of {both.pop()}, response_format and tool_choice can be set.")
    stop_ids = [*chat.stop_token_ids, *field(body, "stop_token_ids", list, [])]
    translated["sampling_params"] |= {**forced, "stop_token_ids": stop_ids}
    if parsed is not None:
        translated["sampling_params"]["skip_special_tokens"] = False
    if body.get("return_meta_info"):
        translated["return_logprob"] = True
    answers = ChatAnswers(body, service.vocab, parsed, tools)
    return await _respond(request, body, translated, answers, "chat.completion")


async def completions(request: Request) -> Response:
    service: EngineService = request.app.state.service
    body = await object_body(request)
    if body.get("prompt") is None:
        raise invalid_body("missing", "Field required", "prompt")
    if body.get("suffix"):
        raise openai_error("suffix is not supported by the embedded engine.")
    top = field(body, "logprobs", int, 0)
    limit = 16 if body.get("max_tokens") is None else body["max_tokens"]
    translated = _translate(body, body["prompt"], limit, top=top, logprobs=body.get("logprobs") is not None)
    if body.get("echo"):
        translated["logprob_start_len"] = 0
    return await _respond(request, body, translated, TextAnswers(body, service.vocab), "text_completion")


async def _respond(request: Request, body: Body, translated: Body, answers: Answers, kind: str) -> Response:
    service: EngineService = request.app.state.service
    try:
        generate = await read(request, service, translated)
    except RequestError as error:
        raise openai_error(str(error), status=error.status) from error
    model = body.get("model") or "default"
    head = {"id": generate.rids[0], "object": kind, "created": int(time.time()), "model": model}
    if generate.body.stream:
        head["object"] = kind.replace("chat.completion", "chat.completion.chunk")
        count = bool(field(body, "stream_options", dict, {}).get("include_usage"))
        return event_stream(_stream(service, generate, head, answers, count=count))
    found = await final_answers(request, service, generate)
    return Json({**head, "choices": [answers.choice(i, answer) for i, answer in enumerate(found)], **usage(found)})


async def _stream(
    service: EngineService, generate: GenerateRequest, head: Body, answers: Answers, *, count: bool
) -> AsyncGenerator[Body]:
    """Yield all chunks of a stream. `count`: the usage comes at the end."""
    sent: defaultdict[int, Sent] = defaultdict(Sent)
    with closing(service.start(generate)) as call:
        async for index in call.progress():
            answer, params = call.answer(index), call.jobs[index].params
            if error := failure(finish := answer["meta_info"]["finish_reason"]):
                yield {"error": error.body}
                return
            if finish is None and not params.no_stop_trim:
                answer["text"] = hold_back(answer["text"], params.stop)
            for entry in answers.new(index, answer, sent[index], finish is not None):
                yield {**head, "choices": [entry]}
        if count:
            yield {**head, "choices": [], **usage([call.answer(index) for index in sorted(sent)])}


ROUTES: Mapping[str, Handler] = {"/v1/chat/completions": chat_completions, "/v1/completions": completions}


@contextmanager
def _blamed(what: str) -> Iterator[None]:
    """Turn an exception of the chat's code into an error that names the malformed part of the body."""
    try:
        yield
    except (MediaError, TemplateError, TypeError, KeyError, AttributeError) as error:
        raise openai_error(f"{what}: {type(error).__name__}: {error}") from error


def _translate(body: Body, prompt: Any, limit: Any, *, top: int, logprobs: bool) -> Body:
    renamed = {"max_new_tokens": limit, "sampling_seed": body.get("seed"), "min_new_tokens": body.get("min_tokens")}
    params = {name: body[name] for name in RequestSampling.model_fields if body.get(name) is not None}
    textual = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str))
    return {
        "text" if textual else "input_ids": prompt,
        "sampling_params": params | renamed,
        "return_logprob": logprobs,
        "top_logprobs_num": top,
        "stream": body.get("stream"),
        "rid": body.get("rid"),
        "lora_path": body.get("lora_path"),
        "return_prompt_token_ids": True,
    }
