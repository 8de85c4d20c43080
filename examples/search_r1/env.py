"""Search-R1: a model that searches while it reasons (Jin et al. 2025, arXiv:2503.09516).

1. `SearchR1Env` uses the paper's tags: <think>...</think><search>query</search>, answered by
   <information>...</information>, and in the end <answer>...</answer>. `SearchR1ToolEnv` is the same with a native
   tool call instead of the tags.
2. Passages: the row's own `metadata["passages"]`, else the corpus in the file `metadata["corpus"]`. But all
   searches go to the retrieval server in the environment variable SEARCH_URL, if it is set.
3. The reward is agentrl.rm_hub's `--rm-type search_r1`: exact match of the answer, and the format.
"""

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

from agentrl import Environment, Message, Sample, Step, Turn, tool
from agentrl.tools.search import BM25Index, RetrievalClient, format_hits, load_corpus

TOP_K = 3
SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)


def find(sample: Sample, query: str) -> str:
    """Return the best passages for `query` among those of the sample."""
    passages = sample.metadata.get("passages")
    index = BM25Index.build(passages) if passages else corpus_index(sample.metadata["corpus"])
    return show(index.search([query], TOP_K)[0])


def show(hits: Sequence[Any]) -> str:
    """Return passages as the model sees them, one a line, best first."""
    return format_hits(hits) or "Nothing found."


@lru_cache(maxsize=4)
def corpus_index(path: str) -> BM25Index:
    """Return the index of a corpus file, built once a process."""
    return BM25Index.build(load_corpus(path))


class _Searching(Environment):
    max_turns = 4
    server: ClassVar[RetrievalClient | None] = None

    @classmethod
    async def setup(cls, args: Any) -> None:
        if url := os.environ.get("SEARCH_URL"):
            cls.server = await RetrievalClient(url).__aenter__()

    @classmethod
    async def teardown(cls) -> None:
        if cls.server is not None:
            await cls.server.__aexit__(None, None, None)

    async def find(self, sample: Sample, query: str) -> str:
        if self.server is not None:
            return show((await self.server.search([query], TOP_K))[0])
        return find(sample, query)  # a thousandth of a second: shorter than the switch to a worker thread


class SearchR1Env(_Searching):
    """Answer a question by searching, in the paper's tags."""

    async def step(self, turn: Turn) -> Step:
        """Run the search that the turn asks for; a turn without one is the last."""
        query = SEARCH.search(turn.text)
        if query is None:
            return Step(done=True)
        found = await self.find(turn.sample, query[1])
        message: Message = {"role": "user", "content": f"<information>{found}</information>"}
        return Step([message], info={"tool_calls": 1, "tool_ok": 1})


class SearchR1ToolEnv(_Searching):
    """Answer a question by searching, with a tool call; the answer stands in <answer> tags as well."""

    async def reset(self, sample: Sample) -> list[Message]:
        """The question; the sample is kept for its passages."""
        self.sample = sample
        return await super().reset(sample)

    @tool
    async def search(self, query: str) -> str:
        """Search for passages.

        Args:
            query: what to look for
        """
        return await self.find(self.sample, query)
