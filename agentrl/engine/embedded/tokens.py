"""POST /v1/tokenize and /v1/detokenize."""

from starlette.requests import Request
from starlette.responses import Response

from agentrl.engine.embedded.http import Json, field, object_body
from agentrl.engine.embedded.request import check_ids, strings
from agentrl.engine.embedded.service import Service


async def tokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await object_body(request)
    prompt = body.get("prompt")
    members = strings(prompt, "prompt")
    special = field(body, "add_special_tokens", bool, True)
    ids = [service.vocab.encode(member, add_special_tokens=special) for member in members]
    single = isinstance(prompt, str)
    shown = {"tokens": ids[0], "count": len(ids[0])} if single else {"tokens": ids, "count": [len(one) for one in ids]}
    return Json({**shown, "max_model_len": service.context})


async def detokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await object_body(request)
    tokens: list[object] = field(body, "tokens", list)
    batch = bool(tokens) and isinstance(tokens[0], list)
    skip = field(body, "skip_special_tokens", bool, True)
    members = tokens if batch else [tokens]
    texts = [service.vocab.decode(check_ids(member, service.vocab.size, "tokens"), skip) for member in members]
    return Json({"text": texts if batch else texts[0]})
