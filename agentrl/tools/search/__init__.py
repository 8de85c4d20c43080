"""Search over passages.

1. `BM25Index` ranks passages by their words (Robertson and Zaragoza 2009); it needs `bm25s`, in the `search` extra.
2. Importing this package is light; bm25s and numpy are loaded when an index is built.
"""

from agentrl.tools.search.index import BM25Index, Hit, Passage

__all__ = ["BM25Index", "Hit", "Passage"]
