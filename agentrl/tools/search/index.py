"""BM25 over passages, in memory or mapped from a folder, whose pages processes share. Words are lower-cased, without
English stop words. A title counts as text. A passage without a query word is no hit. Ties keep the passages' order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import DataError, raised_as
from agentrl.tools.search.passages import Hit, Passage, StoredPassages, find_index, numbered, written_index

_HEADER = "agentrl-index.json"


class BM25Index:
    """Passages with an index over their words; made by `BM25Index.build` or `BM25Index.load`."""

    def __init__(self, passages: Sequence[Passage], retriever: Any) -> None:
        self.passages, self._retriever = passages, retriever

    @classmethod
    def build(cls, passages: Iterable[Passage | str]) -> BM25Index:
        """Index passages; plain strings get their position as id. Raises DataError: no passage has a word."""
        import bm25s

        kept = numbered(passages)
        words = _words([f"{passage.title}\n{passage.text}" for passage in kept], return_ids=True)
        if not kept or not words.vocab:
            raise DataError("the search index needs at least one passage with a word in it, got none")
        retriever = bm25s.BM25(method="lucene")
        retriever.index(words, show_progress=False)
        return cls(kept, retriever)

    def save(self, folder: str | Path) -> None:
        """Write the index and its passages to a folder, which appears complete or not at all. Raises DataError: the
        folder exists and has other content, or cannot be written."""
        with written_index(folder, _HEADER, self.passages) as made:
            self._retriever.save(made, show_progress=False)

    @classmethod
    def load(cls, folder: str | Path) -> BM25Index:
        """Map an index that `save` wrote. Raises DataError: there is none, or its version differs, or it is damaged."""
        import bm25s

        build = f"BM25Index.build(...).save({str(folder)!r}), or with agentrl retrieval --corpus FILE --index DIR"
        source = find_index(folder, _HEADER, f"no search index here; build one with {build}")
        damage = (OSError, ValueError, KeyError)
        with raised_as(DataError, f"{source}: the index cannot be read", *damage, remedy="build it again"):
            retriever = bm25s.BM25.load(source, mmap=True, show_progress=False)
        return cls(StoredPassages(source), retriever)

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[Hit]]:
        """Return at most `k` hits for each query, best first. Raises ValueError: `k` is not positive."""
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        words = _words(list(queries), return_ids=False)
        found = (_top(self._retriever.get_scores(each), k) if each else [] for each in words)
        return [[self.passages[at].hit(score) for at, score in hits] for hits in found]

    def __len__(self) -> int:
        return len(self.passages)


def _top(scores: Any, k: int) -> list[tuple[int, float]]:
    """Return index and value of the `k` best scores above 0, best first, ties in order. `scores`: [passages] float."""
    import numpy as np

    if len(scores) > k:
        least = max(np.partition(scores, len(scores) - k)[len(scores) - k], np.finfo(scores.dtype).tiny)
        candidates = np.flatnonzero(scores >= least)
    else:
        candidates = np.flatnonzero(scores > 0)
    order = candidates[np.argsort(-scores[candidates], kind="stable")][:k]
    return [(int(at), float(scores[at])) for at in order]


def _words(texts: list[str], *, return_ids: bool) -> Any:
    import bm25s

    return bm25s.tokenize(texts, stopwords="en", return_ids=return_ids, show_progress=False)
