"""Search over passages.

1. `BM25Index` ranks passages by their words (Robertson and Zaragoza 2009) and needs `bm25s`, in the `search` extra;
   `DenseIndex` ranks them by meaning and needs the `dense` extra.
2. `RetrievalClient` asks a retrieval server over HTTP, in the form that Search-R1's servers speak;
   `agentrl retrieval` is such a server.
3. `search_tool` makes any of them the tool `search` that a model calls; `RemoteSearch` does so with a server's address.
4. Importing this package is light; bm25s, numpy and the like are loaded when they are used.
"""

from agentrl.tools.search.client import RetrievalClient, RetrievalError
from agentrl.tools.search.dense import DenseIndex, Encoder
from agentrl.tools.search.index import BM25Index
from agentrl.tools.search.passages import Hit, Passage, load_corpus
from agentrl.tools.search.tool import RemoteSearch, format_hits, search_tool

__all__ = [
    "BM25Index",
    "DenseIndex",
    "Encoder",
    "Hit",
    "Passage",
    "RemoteSearch",
    "RetrievalClient",
    "RetrievalError",
    "format_hits",
    "load_corpus",
    "search_tool",
]
