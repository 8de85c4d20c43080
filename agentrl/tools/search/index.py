"""BM25 over a list of passages, in memory.

1. Words are lower-cased, English stop words left out; a passage's title counts as part of its text.
2. A passage that shares no word with the query is no hit, so fewer than `k` hits may come back, or none.
3. Equal scores keep the order of the passages: the same index and query give the same hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import DataError


@dataclass(frozen=True, slots=True)
class Passage:
    """A text that can be found."""

    id: str
    text: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that was found, with its BM25 score (above 0; comparable within one query only)."""

    id: str
    text: str
    title: str
    score: float


class BM25Index:
    """Passages with an index over their words; made by `BM25Index.build`."""

    def __init__(self, passages: Sequence[Passage], retriever: Any) -> None:
        self.passages, self._retriever = passages, retriever

    @classmethod
    def build(cls, passages: Iterable[Passage | str]) -> BM25Index:
        """Index passages; plain strings get their position as id.

        Raises:
            DataError: there is no passage, or none has a word.
        """
        import bm25s

        kept = [Passage(str(at), entry) if isinstance(entry, str) else entry for at, entry in enumerate(passages)]
        words = _words([f"{passage.title}\n{passage.text}" for passage in kept], return_ids=True)
        if not kept or not words.vocab:
            raise DataError("the search index needs at least one passage with a word in it, got none")
        retriever = bm25s.BM25(method="lucene")
        retriever.index(words, show_progress=False)
        return cls(kept, retriever)

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[Hit]]:
        """At most `k` hits for each query, best first.

        Raises:
            ValueError: `k` is not positive.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        return [self._best(words, k) for words in _words(list(queries), return_ids=False)]

    def _best(self, words: list[str], k: int) -> list[Hit]:
        import numpy as np

        if not words:
            return []
        scores = self._retriever.get_scores(words)
        order = np.argsort(-scores, kind="stable")[:k]
        found = [(self.passages[at], float(scores[at])) for at in order if scores[at] > 0]
        return [Hit(passage.id, passage.text, passage.title, score) for passage, score in found]


def _words(texts: list[str], *, return_ids: bool) -> Any:
    import bm25s

    return bm25s.tokenize(texts, stopwords="en", return_ids=return_ids, show_progress=False)
