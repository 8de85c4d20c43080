"""POST /generate: one answer, an array, or a stream of cumulative chunks."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import Any

import orjson
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentrl.engine.embedded.grammar import MAX_GRAMMARS, Grammars
from agentrl.engine.embedded.request import MAX_SEQUENCES, GenerateRequest, at_most, check_ids, parse_generate, strings
from agentrl.engine.embedded.sequence import SequenceState
from agentrl.engine.embedded.service import EngineService
from agentrl.serving.http import Json, RequestError, json_body, openai_error, until_done
from agentrl.serving.server import aside


async def read(request: Request, service: EngineService, body: Any) -> GenerateRequest:
    """Return the checked `body`, with its grammars compiled. Raises RequestError: the body or a grammar is refused."""
    parsed = await aside(request, parse_generate, body, service.vocab, service.context, service.adapter, service.reader)
    if any(job.params.grammar for job in parsed.jobs):
        await to_thread.run_sync(_give_grammars, parsed.jobs, service.grammars)
    return parsed


def _give_grammars(jobs: Sequence[SequenceState], grammars: Grammars) -> None:
    names = {job.params.grammar for job in jobs} - {None}
    at_most(MAX_GRAMMARS, len(names), "grammars")
    compiled = {name: grammars.compiled(*name) for name in names if name}
    for job in jobs:
        if name := job.params.grammar:
            job.grammar = compiled[name].fresh()


async def generate(request: Request) -> Response:
    service: EngineService = request.app.state.service
    body = await json_body(request)
    try:
        parsed = await read(request, service, body)
    except RequestError as error:
        if isinstance(body, dict) and body.get("stream") and isinstance(error.body.get("error"), dict):
            return event_stream(_stream_error(error))
        raise
    if parsed.body.stream:
        return event_stream(_stream(service, parsed))
    answers = await final_answers(request, service, parsed)
    return Json(answers[0] if parsed.single else answers)


async def final_answers(request: Request, service: EngineService, parsed: GenerateRequest) -> list[dict[str, Any]]:
    """Generate all sequences; return their answers. Raises RequestError: a job failed, or the client disconnected."""
    with closing(service.start(parsed)) as call:
        await until_done(request, call.done)
        for job in call.jobs:
            if error := failure(job.finish):
                raise error
        return [call.answer(i) for i in range(len(call.jobs))]


def failure(finish: dict[str, Any] | None) -> RequestError | None:
    """Return the error for a finish reason with a status code: such an abort is an error, not a partial result."""
    if finish is None or (code := finish.get("status_code")) is None:
        return None
    return openai_error(finish["message"], status=code, kind=str(code))


async def _stream(service: EngineService, parsed: GenerateRequest) -> AsyncGenerator[dict[str, Any]]:
    with closing(service.start(parsed)) as call:
        async for index in call.progress():
            answer = call.answer(index)
            yield answer if parsed.single else {**answer, "index": index}


async def _stream_error(error: RequestError) -> AsyncGenerator[dict[str, Any]]:
    yield {"error": {"message": str(error), "type": "invalid_request_error", "code": error.status, "retryable": False}}


def event_stream(chunks: AsyncGenerator[dict[str, Any]]) -> Response:
    """Return a response with each chunk as a server-sent event, and `[DONE]` at the end."""

    async def events() -> AsyncIterator[bytes]:
        async with aclosing(chunks):  # closes the generator when the client disconnects
            async for chunk in chunks:
                yield b"data: " + orjson.dumps(chunk) + b"\n\n"
            yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


MOST = 1 << 20  # approximate maximum of tokens in a text


async def tokenize(service: EngineService, prompt: Any, add_special_tokens: bool = True) -> Response:
    members = strings(prompt, "prompt")
    at_most(MAX_SEQUENCES, len(members), "texts")
    encode = partial(service.vocab.encode, most=MOST, add_special_tokens=add_special_tokens)
    ids = await service.aside(lambda: [encode(member) for member in members])
    counts = [len(one) for one in ids]
    shown = {"tokens": ids, "count": counts} if members is prompt else {"tokens": ids[0], "count": counts[0]}
    return Json({**shown, "max_model_len": service.context})


async def detokenize(service: EngineService, tokens: list[Any], skip_special_tokens: bool = True) -> Response:
    batch = bool(tokens) and isinstance(tokens[0], list)
    members = tokens if batch else [tokens]
    at_most(MAX_SEQUENCES, len(members), "lists of tokens")
    ids = [check_ids(member, service.vocab.size, "tokens") for member in members]
    texts = await service.aside(lambda: [service.vocab.decode(member, skip_special_tokens) for member in ids])
    return Json({"text": texts if batch else texts[0]})
