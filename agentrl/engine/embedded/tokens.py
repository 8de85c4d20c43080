"""POST /v1/tokenize and /v1/detokenize."""

from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from agentrl.engine.embedded.http import Json, fields_of, object_body
from agentrl.engine.embedded.request import MAX_SEQUENCES, at_most, check_ids, strings
from agentrl.engine.embedded.service import Service
from agentrl.serving import aside

MOST = 1 << 20
"""About how many tokens a text may have."""


class _Texts(BaseModel):
    prompt: Any
    add_special_tokens: bool = True


class _Tokens(BaseModel):
    tokens: list[Any]
    skip_special_tokens: bool = True


async def tokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    body = fields_of(_Texts, await object_body(request))
    members = strings(body.prompt, "prompt")
    at_most(MAX_SEQUENCES, len(members), "texts")
    encode = partial(service.vocab.encode, most=MOST, add_special_tokens=body.add_special_tokens)
    ids = await aside(request, lambda: [encode(member) for member in members])
    counts = [len(one) for one in ids]
    shown = {"tokens": ids, "count": counts} if members is body.prompt else {"tokens": ids[0], "count": counts[0]}
    return Json({**shown, "max_model_len": service.context})


async def detokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    body = fields_of(_Tokens, await object_body(request))
    batch = bool(body.tokens) and isinstance(body.tokens[0], list)
    members = body.tokens if batch else [body.tokens]
    at_most(MAX_SEQUENCES, len(members), "lists of tokens")
    size, decode, skip = service.vocab.size, service.vocab.decode, body.skip_special_tokens
    texts = await aside(request, lambda: [decode(check_ids(member, size, "tokens"), skip) for member in members])
    return Json({"text": texts if batch else texts[0]})
