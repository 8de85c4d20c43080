"""Search over passages. `BM25Index` ranks by words (extra `search`), `DenseIndex` by meaning (extra `dense`).
`RetrievalClient` asks a retrieval server in Search-R1's form; `agentrl retrieval` is such a server. `search_tool` makes
any of them a tool; `RemoteSearch` takes a server's address."""

from agentrl.tools.search.client import RetrievalClient, RetrievalError
from agentrl.tools.search.dense import DenseIndex, Encoder
from agentrl.tools.search.index import BM25Index
from agentrl.tools.search.passages import Hit, Passage, load_corpus
from agentrl.tools.search.tool import RemoteSearch, format_hits, search_tool

__all__ = ["BM25Index", "DenseIndex", "Encoder", "Hit", "Passage", "load_corpus"]
__all__ += ["RemoteSearch", "RetrievalClient", "RetrievalError", "format_hits", "search_tool"]
