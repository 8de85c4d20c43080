"""POST /generate: one answer, an array, or a stream of cumulative chunks."""

from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentrl.engine.embedded.errors import RequestError, openai_error, refused
from agentrl.engine.embedded.http import Json, error_response, json_body, until_done_or_gone
from agentrl.engine.embedded.request import GenerateRequest, parse_generate
from agentrl.engine.embedded.results import answer
from agentrl.engine.embedded.service import Call, Service

DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499
"""Nobody reads this status; it is what proxies log for a client that closed the connection."""


async def generate(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await json_body(request)
    try:
        parsed = parse_generate(body, service.vocab, service.context)
    except RequestError as error:
        if isinstance(body, dict) and body.get("stream") and isinstance(error.body.get("error"), dict):
            return event_stream(_stream_error(error))
        return error_response(error)
    if parsed.stream:
        return event_stream(_stream(service, service.start(parsed)))
    answers = await final_answers(request, service, parsed)
    if answers is None:
        return Response(status_code=CLIENT_GONE)
    return Json(answers[0] if parsed.single else answers)


async def final_answers(request: Request, service: Service, parsed: GenerateRequest) -> list[dict[str, Any]] | None:
    """Generate all sequences to their end; None when the client has gone, and its jobs with it."""
    call = service.start(parsed)
    try:
        if not await until_done_or_gone(request, call.done):
            return None
        return [_final(service, call, i) for i in range(len(call.jobs))]
    finally:
        call.close()


def raise_for_failed(finish: dict[str, Any] | None) -> None:
    """An abort that carries a status code is an error answer, not a partial result."""
    code = (finish or {}).get("status_code")
    if code == 400:
        raise refused(finish["message"] if finish else "")
    if code is not None and finish is not None:
        raise openai_error(finish["message"], status=code, kind=str(code))


def _final(service: Service, call: Call, index: int) -> dict[str, Any]:
    raise_for_failed(call.jobs[index].finish)
    return _answer(service, call, index)


def _answer(service: Service, call: Call, index: int) -> dict[str, Any]:
    return answer(
        call.jobs[index],
        call.request.sequences[index],
        service.vocab,
        version=service.version,
        texts=call.request.text_in_logprobs,
        prompt_ids=call.request.prompt_ids_wanted,
    )


async def _stream(service: Service, call: Call) -> AsyncIterator[bytes]:
    try:
        async for index in call.progress():
            chunk = _answer(service, call, index)
            if not call.request.single:
                chunk["index"] = index
            yield event(chunk)
        yield DONE
    finally:
        call.close()


async def _stream_error(error: RequestError) -> AsyncIterator[bytes]:
    detail = {"message": str(error), "type": "invalid_request_error", "code": error.status, "retryable": False}
    yield event({"error": detail})
    yield DONE


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


def event_stream(chunks: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(chunks, media_type="text/event-stream")
