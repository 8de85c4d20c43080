"""A client for retrieval servers with Search-R1's HTTP form.

1. `POST url` with `{"queries": [...], "topk": k, "return_scores": true}`; the answer is `{"result": [[{"document":
   {"id", "contents"}, "score"}, ...], ...]}`, one list per query (without scores, entries are documents).
2. Concurrent queries share one request. Answers are cached.
3. Every query has a deadline. Only a refused connection is retried, because the server has not seen the request."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import anyio

from agentrl.errors import PluginError, ToolFailure, raised_as
from agentrl.tools.search.passages import Hit, split_title

if TYPE_CHECKING:
    import httpx


_MAX_QUERIES, _MAX_REQUESTS = 64, 32  # queries in one request, and requests in flight


class RetrievalError(ToolFailure):
    """The retrieval server cannot be reached, is too slow, or does not answer with passages. In an environment's own
    code, this error is a tool's failure, which the run's failure policy handles."""

    default_kind = "tool_retrieval"


@dataclass(eq=False)
class _Batch:
    """Queries of one request."""

    k: int
    queries: dict[str, None] = field(default_factory=dict)
    task: asyncio.Task[dict[str, list[Hit]]] | None = None


class RetrievalClient:
    """Client of a retrieval server, an async context manager.

    async with RetrievalClient("http://127.0.0.1:8000/retrieve") as client:
        [hits] = await client.search(["who wrote Emma?"], k=3)"""

    def __init__(self, url: str, *, timeout: float = 30.0, cache_size: int = 10_000) -> None:
        """Use the endpoint `url`; a bare address gets the path `/retrieve`. `timeout`: seconds for one query, waiting
        included. `cache_size`: maximum number of answers in the LRU cache. Raises PluginError: `url` is not http."""
        scheme, _, rest = url.partition("://")
        if scheme not in ("http", "https") or not rest:
            raise PluginError(f"retrieval server: expected an address like http://127.0.0.1:8000/retrieve, got {url!r}")
        self.url = url if "/" in rest.rstrip("/") else f"{url.rstrip('/')}/retrieve"
        self.timeout, self._cache_size = timeout, cache_size
        self._cache, self._slots = OrderedDict[tuple[str, int], list[Hit]](), anyio.Semaphore(_MAX_REQUESTS)
        self._open, self._tasks = dict[int, _Batch](), set[asyncio.Task[Any]]()
        self._http: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        import httpx

        transport = httpx.AsyncHTTPTransport(retries=2)  # of refused connections only
        self._http = httpx.AsyncClient(transport=transport, timeout=self.timeout, trust_env=False)
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def search(self, queries: Sequence[str], k: int = 3) -> list[list[Hit]]:
        """Return at most `k` hits for each query, best first. Raises RetrievalError: the server failed or timed out."""
        found: dict[str, list[Hit]] = {}
        late = f"the retrieval server {self.url} did not answer within {self.timeout:g} s; is it overloaded?"
        with raised_as(RetrievalError, late, TimeoutError, shown=""), anyio.fail_after(self.timeout):
            waiting = [batch for query in dict.fromkeys(queries) if (batch := self._ask(query, k, found))]
            for task in {batch.task for batch in waiting if batch.task is not None}:
                found |= await asyncio.shield(task)
        return [found[query] for query in queries]

    def _ask(self, query: str, k: int, found: dict[str, list[Hit]]) -> _Batch | None:
        """Put the cached answer into `found`; without one, add the query to the next batch and return the batch."""
        if (query, k) in self._cache:
            self._cache.move_to_end((query, k))
            found[query] = self._cache[query, k]
            return None
        if (batch := self._open.get(k)) is None or len(batch.queries) >= _MAX_QUERIES:
            batch = self._open[k] = _Batch(k)
            batch.task = asyncio.create_task(self._send(batch))
            self._tasks.add(batch.task)
            batch.task.add_done_callback(self._finished)
        batch.queries[query] = None
        return batch

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the waiting callers have raised it; without this call asyncio would log it

    async def _send(self, batch: _Batch) -> dict[str, list[Hit]]:
        async with self._slots:
            if self._open.get(batch.k) is batch:
                del self._open[batch.k]
            queries = list(batch.queries)
            answers = _read(await self._post(queries, batch.k), len(queries), self.url)
        found = dict(zip(queries, answers, strict=True))
        self._cache.update({(query, batch.k): hits for query, hits in found.items()})
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return found

    async def _post(self, queries: list[str], k: int) -> Any:
        import httpx

        if self._http is None:
            raise RetrievalError("the RetrievalClient is not open; use `async with RetrievalClient(url) as client`")
        try:
            answer = await self._http.post(self.url, json={"queries": queries, "topk": k, "return_scores": True})
        except httpx.TransportError as error:
            said = f"({type(error).__name__}: {error}); start one with agentrl retrieval --corpus FILE"
            raise RetrievalError(f"the retrieval server {self.url} cannot be reached {said}") from error
        if answer.status_code != 200:
            raise RetrievalError(f"the retrieval server {self.url} answered {answer.status_code}: {answer.text:.200}")
        what = f"the retrieval server {self.url} answered no JSON: {answer.text:.200}"
        with raised_as(RetrievalError, what, ValueError, shown=""):
            return answer.json()


def _read(answer: Any, expected: int, url: str) -> list[list[Hit]]:
    result = answer.get("result") if isinstance(answer, dict) else None
    try:
        if not isinstance(result, list) or len(result) != expected:
            raise TypeError
        return [[_hit(entry, rank) for rank, entry in enumerate(entries)] for entries in result]
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        form = f'{{"result": [...]}} with {expected} lists of documents'
        raise RetrievalError(f"the retrieval server {url} must answer {form}, got {answer!s:.200}") from error


def _hit(entry: Any, rank: int) -> Hit:
    document = entry.get("document", entry)
    text = document["contents"] if "contents" in document else document["text"]
    title, text = (title, text) if (title := document.get("title")) else split_title(text)
    return Hit(str(document.get("id", "")), text, title, float(entry.get("score", -rank)))
