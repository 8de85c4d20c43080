"""The tool `search` that a model calls, over any searcher."""

import inspect
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, Unpack

from agentrl.tools.arguments import OutcomeKind, ToolError
from agentrl.tools.base import DEFAULT_TIMEOUT, CallOptions, Tool, ToolSource
from agentrl.tools.search.client import RetrievalClient, RetrievalError
from agentrl.tools.search.passages import MAX_QUERY_CHARS, Hit


class Searcher(Protocol):
    """A searchable corpus: `BM25Index`, `DenseIndex`, `RetrievalClient`, or your own."""

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[Hit]] | Awaitable[list[list[Hit]]]: ...


def search_tool(
    searcher: Searcher,
    *,
    k: int = 3,
    name: str = "search",
    description: str = "Search for passages about a question.",
    max_passage_chars: int = 2_000,
    **options: Unpack[CallOptions],
) -> Tool:
    """Return a tool with one argument, `query`, that shows the `k` best passages, each cut to `max_passage_chars`. A
    blocking `searcher` runs in a thread. `options`: options of `Tool`, such as `timeout`. With `on_failure="fail"`, a
    failed search server ends the trajectory, and the model does not see the failure."""

    def asked(query: str) -> Any:
        if not query.strip():
            raise ToolError("the query is empty; say what to look for")
        if len(query) > MAX_QUERY_CHARS:  # a server would refuse the queries of others, too
            raise ToolError(f"the query has {len(query)} characters; give at most {MAX_QUERY_CHARS}")
        return searcher.search([query], k)

    def shown(found: list[list[Hit]]) -> str:
        return format_hits(found[0], max_passage_chars) or "No results."

    async def later(found: Awaitable[list[list[Hit]]]) -> str:
        try:
            return shown(await found)
        except RetrievalError as error:  # `on_failure` decides, not the error
            raise ToolError(str(error), kind=OutcomeKind.RAISED) from error

    def blocking(query: str) -> Any:
        return later(found) if inspect.isawaitable(found := asked(query)) else shown(found)

    async def waiting(query: str) -> str:
        return await later(asked(query))

    function = waiting if inspect.iscoroutinefunction(searcher.search) else blocking
    return Tool(function, name=name, description=description, **options)


class RemoteSearch(ToolSource):
    """The tool `search` over a retrieval server, as an entry of `Environment.tools`, which also opens the client."""

    def __init__(self, client: RetrievalClient | str, **options: Any) -> None:
        """Search by a client, or at a server's address. `options`: those of `search_tool`."""
        timeout = options.get("timeout", DEFAULT_TIMEOUT)
        self._client = RetrievalClient(client, timeout=timeout) if isinstance(client, str) else client
        self._tool = search_tool(self._client, **options)

    @property
    def tools(self) -> Sequence[Tool]:
        return (self._tool,)

    async def open(self) -> None:
        """Open the client; the server is asked only when the model searches."""
        await self._client.__aenter__()

    async def close(self) -> None:
        await self._client.__aexit__()


def format_hits(hits: Sequence[Hit], max_passage_chars: int = 2_000) -> str:
    """Return passages for the model: `Doc 1 (Title: ...) text`, one per line, as in Search-R1 (arXiv:2503.09516)."""
    return "\n".join(f"Doc {rank} {_shown(hit, max_passage_chars)}" for rank, hit in enumerate(hits, 1))


def _shown(hit: Hit, most: int) -> str:
    text = " ".join(hit.text[: most + 1].split())
    cut = text if len(hit.text) <= most else f"{text[:most]}..."
    return f"(Title: {hit.title}) {cut}" if hit.title else cut
