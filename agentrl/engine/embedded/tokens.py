"""POST /v1/tokenize and /v1/detokenize; see `http.takes_body`."""

from functools import partial
from typing import Any

from starlette.responses import Response

from agentrl.engine.embedded.http import Json
from agentrl.engine.embedded.request import MAX_SEQUENCES, at_most, check_ids, strings
from agentrl.engine.embedded.service import Service

MOST = 1 << 20
"""About how many tokens a text may have."""


async def tokenize(service: Service, prompt: Any, add_special_tokens: bool = True) -> Response:
    members = strings(prompt, "prompt")
    at_most(MAX_SEQUENCES, len(members), "texts")
    encode = partial(service.vocab.encode, most=MOST, add_special_tokens=add_special_tokens)
    ids = await service.aside(lambda: [encode(member) for member in members])
    counts = [len(one) for one in ids]
    shown = {"tokens": ids, "count": counts} if members is prompt else {"tokens": ids[0], "count": counts[0]}
    return Json({**shown, "max_model_len": service.context})


async def detokenize(service: Service, tokens: list[Any], skip_special_tokens: bool = True) -> Response:
    batch = bool(tokens) and isinstance(tokens[0], list)
    members = tokens if batch else [tokens]
    at_most(MAX_SEQUENCES, len(members), "lists of tokens")
    size, decode = service.vocab.size, service.vocab.decode
    ids = [check_ids(member, size, "tokens") for member in members]
    texts = await service.aside(lambda: [decode(member, skip_special_tokens) for member in ids])
    return Json({"text": texts if batch else texts[0]})
