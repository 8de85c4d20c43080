"""POST /generate: one answer, an array, or a stream of cumulative chunks."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, closing
from typing import Any

import orjson
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentrl.engine.embedded.errors import RequestError, openai_error
from agentrl.engine.embedded.grammar import MOST_GRAMMARS, Grammars
from agentrl.engine.embedded.http import Json, json_body, until_done
from agentrl.engine.embedded.job import Job
from agentrl.engine.embedded.request import GenerateRequest, at_most, parse_generate
from agentrl.engine.embedded.service import Service
from agentrl.serving import aside


async def read(request: Request, service: Service, body: Any) -> GenerateRequest:
    """`body` checked, with its grammars compiled; raises `RequestError`."""
    parsed = await aside(request, parse_generate, body, service.vocab, service.context, service.adapter)
    if any(job.params.grammar for job in parsed.jobs):
        await to_thread.run_sync(_give_grammars, parsed.jobs, service.grammars)
    return parsed


def _give_grammars(jobs: Sequence[Job], grammars: Grammars) -> None:
    names = {job.params.grammar for job in jobs} - {None}
    at_most(MOST_GRAMMARS, len(names), "grammars")
    compiled = {name: grammars.compiled(*name) for name in names if name}
    for job in jobs:
        if name := job.params.grammar:
            job.grammar = compiled[name].fresh()


async def generate(request: Request) -> Response:
    service: Service = request.app.state.service
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


async def final_answers(request: Request, service: Service, parsed: GenerateRequest) -> list[dict[str, Any]]:
    """Generate all sequences to their end; raises `RequestError` when the client has gone, and its jobs with it."""
    with closing(service.start(parsed)) as call:
        await until_done(request, call.done)
        for job in call.jobs:
            raise_for_failed(job.finish)
        return [call.answer(i) for i in range(len(call.jobs))]


def raise_for_failed(finish: dict[str, Any] | None) -> None:
    """An abort that carries a status code is an error answer, not a partial result."""
    if finish is not None and finish.get("status_code") is not None:
        code = finish["status_code"]
        raise openai_error(finish["message"], status=code, kind=str(code))


async def _stream(service: Service, parsed: GenerateRequest) -> AsyncGenerator[dict[str, Any]]:
    with closing(service.start(parsed)) as call:
        async for index in call.progress():
            answer = call.answer(index)
            yield answer if parsed.single else {**answer, "index": index}


async def _stream_error(error: RequestError) -> AsyncGenerator[dict[str, Any]]:
    detail = {"message": str(error), "type": "invalid_request_error", "code": error.status, "retryable": False}
    yield {"error": detail}


def event_stream(chunks: AsyncGenerator[dict[str, Any]]) -> Response:
    """Each chunk as a server-sent event, and the mark of the end."""

    async def events() -> AsyncIterator[bytes]:
        async with aclosing(chunks):  # what a chunk's source holds is let go of when the client has
            async for chunk in chunks:
                yield b"data: " + orjson.dumps(chunk) + b"\n\n"
            yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
