"""Dense retrieval: passages and queries as vectors of a sentence-embedding model, by exact inner product (faiss).

1. `Encoder.load(folder)` is a Hugging Face encoder with mean pooling and normalised vectors (Reimers and Gurevych
   2019), such as all-MiniLM-L6-v2. Some models need prefixes ("query: ", "passage: "), which `load` accepts.
2. `DenseIndex` searches by vectors; it has the same `build`, `save`, `load` and `search` as `BM25Index`.
3. It needs the `dense` extra. torch is used only through transformers, after an encoder is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from agentrl.errors import DataError, raised_as
from agentrl.tools.search.passages import Hit, Passage, StoredPassages, find_index, numbered, written_index

_HEADER, _VECTORS = "agentrl-dense-index.json", "vectors.faiss"


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encoder of texts to vectors of length 1."""

    folder: str
    tokenizer: Any
    model: Any
    query_prefix: str = ""
    passage_prefix: str = ""
    max_tokens: int = 256
    batch_size: int = 64

    @classmethod
    def load(cls, folder: str | Path, *, query_prefix: str = "", passage_prefix: str = "", **options: Any) -> Self:
        """Load a Hugging Face encoder folder. Raises DataError: there is no encoder in the folder."""
        from transformers import AutoModel, AutoTokenizer

        path = str(folder)
        with raised_as(DataError, f"{path}: no encoder could be loaded from here", OSError, ValueError):
            tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path)
        model.eval().requires_grad_(False)
        return cls(path, tokenizer, model, query_prefix, passage_prefix, **options)

    def encode(self, texts: Sequence[str]) -> Any:
        """Return vectors [texts, width] float32, each of length 1."""
        parts = [self._batch(texts[at : at + self.batch_size]) for at in range(0, len(texts), self.batch_size)]
        return np.concatenate(parts) if parts else np.zeros((0, self.model.config.hidden_size), np.float32)

    def _batch(self, texts: Sequence[str]) -> Any:
        cut = {"padding": True, "truncation": True, "max_length": self.max_tokens}
        inputs = self.tokenizer(list(texts), **cut, return_tensors="pt")
        states = self.model(**inputs).last_hidden_state.float().numpy()
        mask = inputs["attention_mask"].numpy()[:, :, None]
        mean = (states * mask).sum(1) / np.maximum(mask.sum(1), 1)
        return (mean / np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-12)).astype(np.float32)


class DenseIndex:
    """Passages with their vectors; made by `DenseIndex.build` or `DenseIndex.load`."""

    def __init__(self, passages: Sequence[Passage], vectors: Any, encoder: Encoder) -> None:
        self.passages, self._vectors, self.encoder = passages, vectors, encoder

    @classmethod
    def build(cls, passages: Iterable[Passage | str], encoder: Encoder) -> DenseIndex:
        """Encode and index passages; plain strings get their position as id. Raises DataError: there is no passage."""
        import faiss

        if not (kept := numbered(passages)):
            raise DataError("the search index needs at least one passage, got none")
        texts = [f"{p.title}\n{p.text}" if p.title else p.text for p in kept]
        vectors = encoder.encode([encoder.passage_prefix + text for text in texts])
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        return cls(kept, index, encoder)

    def save(self, folder: str | Path) -> None:
        """Write vectors and passages to a folder, which appears complete or not at all. Raises DataError: the folder
        exists and has other content, or cannot be written."""
        import faiss

        with written_index(folder, _HEADER, self.passages) as made:
            faiss.write_index(self._vectors, str(made / _VECTORS))

    @classmethod
    def load(cls, folder: str | Path, encoder: Encoder) -> DenseIndex:
        """Map an index that `save` wrote; `encoder` must be the one it was built with. Raises DataError: there is no
        index, or its version or the width of its vectors differs."""
        import faiss

        source = find_index(folder, _HEADER, "no dense index here; build one with DenseIndex.build(...).save(...)")
        vectors = faiss.read_index(str(source / _VECTORS), faiss.IO_FLAG_MMAP)
        if vectors.d != encoder.model.config.hidden_size:
            other = f"{vectors.d}, the encoder {encoder.folder} makes {encoder.model.config.hidden_size}"
            raise DataError(f"{source} holds vectors of width {other}; load the one that the index was built with")
        return cls(StoredPassages(source), vectors, encoder)

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[Hit]]:
        """Return at most `k` hits per query, best first, scored by cosine. Raises ValueError: `k` is not positive."""
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if not queries:
            return []
        asked = self.encoder.encode([self.encoder.query_prefix + query for query in queries])
        scores, places = self._vectors.search(asked, min(k, len(self)))
        return [
            [self.passages[at].hit(float(score)) for at, score in zip(row.tolist(), row_scores, strict=True) if at >= 0]
            for row, row_scores in zip(places, scores, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.passages)
