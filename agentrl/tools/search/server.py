"""A retrieval server with Search-R1's HTTP form over an index; `agentrl retrieval` runs it.

1. `POST /retrieve` with `{"queries": [...], "topk": 3, "return_scores": false}`; `GET /health` has the number of
   passages. An invalid request gets 422 and one sentence.
2. Searches run in threads, at most `concurrency` at once; the event loop only reads and writes."""

from typing import Any

import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.serving.http import Json
from agentrl.serving.server import read_json
from agentrl.tools.search.dense import DenseIndex
from agentrl.tools.search.index import BM25Index
from agentrl.tools.search.passages import MAX_QUERY_CHARS, Hit

MAX_QUERIES, MAX_TOPK = 4_096, 1_000


def application(index: BM25Index | DenseIndex, *, topk: int = 3, concurrency: int = 4) -> Starlette:
    """Return the server as an ASGI application. `topk`: default passages per query. `concurrency`: searches at once."""
    limiter = anyio.CapacityLimiter(concurrency)

    async def retrieve(request: Request) -> Response:
        try:
            queries, k, scores = _read(await read_json(request), topk)
        except ValueError as error:
            return Json({"detail": str(error)}, 422)
        found = await anyio.to_thread.run_sync(index.search, queries, k, limiter=limiter)
        return Json({"result": [[_document(hit, scores) for hit in hits] for hits in found]})

    async def health(request: Request) -> Response:
        return Json({"status": "ok", "passages": len(index)})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health, methods=["GET"])])


def _read(body: Any, topk: int) -> tuple[list[str], int, bool]:
    queries = body.get("queries") if isinstance(body, dict) else None
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError('expected {"queries": [text, ...], "topk": number, "return_scores": true or false}')
    if len(queries) > MAX_QUERIES or any(len(query) > MAX_QUERY_CHARS for query in queries):
        raise ValueError(f"at most {MAX_QUERIES} queries of at most {MAX_QUERY_CHARS} characters a request")
    k = topk if body.get("topk") is None else body["topk"]
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_TOPK:
        raise ValueError(f"topk must be a whole number from 1 to {MAX_TOPK}, got {k!r:.50}")
    return queries, k, bool(body.get("return_scores", False))


def _document(hit: Hit, scores: bool) -> dict[str, Any]:
    document = {"id": hit.id, "contents": f'"{hit.title}"\n{hit.text}' if hit.title else hit.text}
    return {"document": document, "score": hit.score} if scores else document
