"""Search: ranking against a plain formula, indexes on disk, the HTTP form, and error messages."""

import contextlib
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import DataError, PluginError, ToolFailure
from agentrl.tools import OutcomeKind
from agentrl.tools.search import (
    BM25Index,
    Hit,
    Passage,
    RemoteSearch,
    RetrievalClient,
    RetrievalError,
    load_corpus,
    search_tool,
)
from agentrl.tools.search.server import application
from agentrl.tools.search.tool import format_hits

PASSAGES = [
    Passage("a", "The river Zorgon flows past old Jorcot.", "Zorgon"),
    Passage("b", "Jorcot has a king, and the king has a river.", "Jorcot"),
    Passage("c", "Nothing about water here."),
    Passage("d", "The king of Dunel eats bread.", "Dunel"),
]
WORDS = st.sampled_from(["river", "king", "bread", "water", "zorgon", "jorcot", "stone", "tree"])


def plain_bm25(texts: list[str], query: str, k1: float = 1.5, b: float = 0.75) -> list[float]:
    """Return Lucene's BM25 (Robertson and Zaragoza 2009, with idf = log(1 + (N - n + .5) / (n + .5))), written out."""
    documents = [re.findall(r"\w\w+", text.lower()) for text in texts]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        counts, score = Counter(document), 0.0
        for word in re.findall(r"\w\w+", query.lower()):
            n = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
            tf = counts[word]
            score += idf * tf / (tf + k1 * (1 - b + b * len(document) / mean))
        scores.append(score)
    return scores


@given(
    st.lists(st.lists(WORDS, min_size=1, max_size=8).map(" ".join), min_size=1, max_size=12),
    st.lists(WORDS, min_size=1, max_size=4, unique=True).map(" ".join),
    st.integers(1, 15),
)
def test_hits_are_those_of_the_plain_formula(texts: list[str], query: str, k: int) -> None:
    (hits,) = BM25Index.build(texts).search([query], k)
    scores = plain_bm25(texts, query)
    best = sorted((score for score in scores if score > 0), reverse=True)[:k]
    assert [hit.score for hit in hits] == pytest.approx(best, rel=1e-4)
    assert all(scores[int(hit.id)] == pytest.approx(hit.score, rel=1e-4) for hit in hits)
    equal = [(hit.score, int(hit.id)) for hit in hits]
    assert equal == sorted(equal, key=lambda pair: (-pair[0], pair[1]))


def test_titles_count_and_words_that_nobody_has_find_nothing() -> None:
    index = BM25Index.build(PASSAGES)
    first, none, empty = index.search(["Dunel", "xylophone", ""], k=2)
    assert [hit.id for hit in first] == ["d"]
    assert none == empty == []
    with pytest.raises(ValueError, match="at least 1"):
        index.search(["x"], k=0)


@pytest.mark.parametrize("passages", [[], ["", "  "]])
def test_nothing_to_index(passages: list[str]) -> None:
    with pytest.raises(DataError, match="at least one passage"):
        BM25Index.build(passages)


def test_a_saved_index_gives_the_same_hits(tmp_path: Path) -> None:
    index = BM25Index.build(PASSAGES)
    index.save(tmp_path / "index")
    loaded = BM25Index.load(tmp_path / "index")
    queries = ["king river", "jorcot", "water"]
    assert loaded.search(queries, 3) == index.search(queries, 3)
    assert (len(loaded), list(loaded.passages)) == (4, PASSAGES)
    assert (loaded.passages[-1], loaded.passages[1:3]) == (PASSAGES[-1], PASSAGES[1:3])
    BM25Index.build(PASSAGES[:2]).save(tmp_path / "index")
    assert len(BM25Index.load(tmp_path / "index")) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["index"], "nothing is left beside it"


def test_folders_that_hold_no_index(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no search index here; build one with .* agentrl retrieval --corpus"):
        BM25Index.load(tmp_path / "none")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(DataError, match="holds something that is no search index"):
        BM25Index.build(PASSAGES).save(tmp_path / "mine")
    BM25Index.build(PASSAGES).save(tmp_path / "index")
    (tmp_path / "index" / "passages.jsonl").write_bytes(b"{}\n")
    with pytest.raises(DataError, match="do not belong together; build the index again"):
        BM25Index.load(tmp_path / "index")
    (tmp_path / "index" / "vocab.index.json").unlink()
    with pytest.raises(DataError, match="build it again"):
        BM25Index.load(tmp_path / "index")


def test_corpora_in_every_form(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 7, "text": "Plain.", "title": "T"},
        {"contents": '"Title"\nBody with "quotes"\nand lines.'},
        {"id": "x", "contents": "No title here."},
        {"id": None, "text": "Without an id."},
    ]
    expected = [
        Passage("7", "Plain.", "T"),
        Passage("1", 'Body with "quotes"\nand lines.', "Title"),
        Passage("x", "No title here."),
        Passage("3", "Without an id."),
    ]
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(load_corpus(file)) == expected
    columns = [{"id": p.id, "text": p.text, "title": p.title} for p in expected]
    pq.write_table(pa.Table.from_pylist(columns), tmp_path / "corpus.parquet")
    assert list(load_corpus(tmp_path / "corpus.parquet")) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "ok"}\n{"text": "cut of', "line 2: malformed JSON"),
        (
            '{"text": "ok"}\n\n{"txt": "x"}\n',
            r"line 3: expected a passage's text in the field 'text' or 'contents', found \['txt'\]",
        ),
        ('{"text": 5}\n', "line 1: field 'text' must be text, got int"),
        ('{"text": "a", "title": ["b"]}\n', "line 1: field 'title' must be text, got list"),
        ("", "is empty"),
    ],
)
def test_broken_corpora(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match=message):
        list(load_corpus(file))
    with pytest.raises(DataError, match="corpus .* does not exist"):
        list(load_corpus(tmp_path / "none.jsonl"))


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """Start a real `agentrl retrieval` process. Yields its address."""
    command = [sys.executable, "-m", "agentrl", "retrieval", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://\S+", line)
        assert address, line
        yield address.group()
    finally:
        process.terminate()
        process.wait(120)


@contextlib.asynccontextmanager
async def corpus_server(tmp_path: Path) -> AsyncIterator[str]:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"id": p.id, "text": p.text, "title": p.title}) + "\n" for p in PASSAGES))
    with serving("--corpus", str(file), "--index", str(tmp_path / "index")) as url:
        yield url


async def test_client_and_server_give_the_indexs_hits(tmp_path: Path) -> None:
    index = BM25Index.build(PASSAGES)
    async with corpus_server(tmp_path) as url, RetrievalClient(url) as client:
        queries = ["king river", "jorcot", "nothing at all about xylophones", "king river"]
        assert await client.search(queries, k=2) == index.search(queries, k=2)
        answers: list[list[Hit]] = []

        async def ask(query: str) -> None:
            answers.append((await client.search([query], k=1))[0])

        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(ask, "bread")
        assert answers == index.search(["bread"], k=1) * 50
        source = RemoteSearch(url, k=1)
        await source.open()
        assert "The king of Dunel" in (await source.tools[0].run({"query": "bread"})).text
        await source.close()
        tool = search_tool(client, k=1)
        assert (await tool.run({"query": "bread"})).text == "Doc 1 (Title: Dunel) The king of Dunel eats bread."
        assert (await tool.run({"query": "xylophone"})).text == "No results."
        empty = await tool.run({"query": " "})
        assert (empty.kind, empty.text) == (OutcomeKind.REFUSED, "Error: the query is empty; say what to look for")


def test_the_timeout_of_a_remote_search_is_also_the_clients() -> None:
    assert RemoteSearch("http://127.0.0.1:1", timeout=120)._client.timeout == 120
    assert RemoteSearch("http://127.0.0.1:1")._client.timeout == 30


def wire(body: object) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(application(BM25Index.build(PASSAGES)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/retrieve", json=body)

    return anyio.run(send)


def test_the_wire_form_is_search_r1s() -> None:
    plain = wire({"queries": ["bread", "nobody"], "topk": 1}).json()
    assert plain == {"result": [[{"id": "d", "contents": '"Dunel"\nThe king of Dunel eats bread.'}], []]}
    scored = wire({"queries": ["bread"], "topk": 1, "return_scores": True}).json()["result"][0][0]
    assert scored["document"] == plain["result"][0][0]
    assert scored["score"] > 0
    assert len(wire({"queries": ["king river"]}).json()["result"][0]) == 3, "topk's default"


@pytest.mark.parametrize(
    "body",
    [{}, [], {"queries": "one"}, {"queries": [1]}, {"queries": ["x"], "topk": 0}, {"queries": ["x"], "topk": "3"}],
)
def test_requests_that_cannot_be_used(body: object) -> None:
    answer = wire(body)
    assert answer.status_code == 422
    assert "expected" in answer.json()["detail"] or "topk must be" in answer.json()["detail"]


async def test_a_searcher_may_return_an_awaitable_and_long_queries_reach_no_server() -> None:
    class Delegating:
        def __init__(self) -> None:
            self.index = BM25Index.build(PASSAGES)

        async def _later(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
            return self.index.search(queries, k)

        def search(self, queries: Sequence[str], k: int = 3) -> Awaitable[list[list[Hit]]]:
            return self._later(queries, k)

    tool = search_tool(Delegating(), k=1)
    assert (await tool.run({"query": "bread"})).text == format_hits(BM25Index.build(PASSAGES).search(["bread"], 1)[0])
    assert "has 20001 characters; give at most 20000" in (await tool.run({"query": "a" * 20_001})).text


async def test_a_server_that_is_down_is_named() -> None:
    async with RetrievalClient("http://127.0.0.1:9", timeout=5) as client:
        with pytest.raises(
            RetrievalError, match=r"127.0.0.1:9/retrieve cannot be reached .* agentrl retrieval --corpus"
        ):
            await client.search(["x"])
        observed = await search_tool(client).run({"query": "x"})
        assert observed.kind is OutcomeKind.RAISED
        with pytest.raises(ToolFailure, match="cannot be reached"):
            await search_tool(client, on_failure="fail").run({"query": "x"})
    with pytest.raises(RetrievalError, match="is not open"):
        await client.search(["x"])
    with pytest.raises(PluginError, match="expected an address"):
        RetrievalClient("127.0.0.1:8000")


@contextlib.asynccontextmanager
async def faulty(answer: bytes | None) -> AsyncIterator[str]:
    """Serve, for fault injection: answers every request with `answer`, or never."""

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            if answer is None:
                await anyio.sleep_forever()
            else:
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\nConnection: close\r\n\r\n"
                await stream.send(head.encode() + answer)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        yield f"http://127.0.0.1:{port}"
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    "answer", [b"<html>", b'{"result": []}', b'{"result": [[{"score": 1}]]}', b'{"result": [[3]]}', b"[]"]
)
async def test_servers_that_answer_nonsense(answer: bytes) -> None:
    async with faulty(answer) as url, RetrievalClient(url, timeout=10) as client:
        with pytest.raises(RetrievalError, match=r"answered no JSON|must answer \{\"result\""):
            await client.search(["x"])


async def test_a_server_that_never_answers_meets_the_deadline() -> None:
    async with faulty(None) as url, RetrievalClient(url, timeout=0.2) as client:
        with pytest.raises(RetrievalError, match="did not answer within 0.2 s|cannot be reached"):
            await client.search(["x"])


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "agentrl", "retrieval", *arguments], capture_output=True, text=True
        )
        assert done.returncode == 2
        return done.stderr

    assert "give --corpus FILE, --index DIR" in said()
    assert "corpus" in said("--port", "0", "--corpus", str(tmp_path / "none.jsonl"))


def test_dense_search_over_a_tiny_encoder(tmp_path: Path) -> None:
    """A random encoder ranks nothing sensibly, but a text is always nearest to itself."""
    from transformers import BertConfig, BertModel

    from agentrl import tiny
    from agentrl.tools.search import DenseIndex, Encoder

    tiny.create(tmp_path / "model", layers=1, hidden=32)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=512, **sizes)).save_pretrained(tmp_path / "model")
    encoder = Encoder.load(tmp_path / "model")
    texts = [p.text for p in PASSAGES]
    index = DenseIndex.build(texts, encoder)
    for query, hits in zip(texts, index.search(texts, k=2), strict=True):
        assert hits[0].text == query
        assert hits[0].score == pytest.approx(1.0, abs=1e-5)
        assert hits[1].score < hits[0].score
    index.save(tmp_path / "index")
    assert DenseIndex.load(tmp_path / "index", encoder).search(texts[:1], k=4) == index.search(texts[:1], k=4)
    with pytest.raises(DataError, match="no dense index here"):
        DenseIndex.load(tmp_path, encoder)
    with pytest.raises(DataError, match="no encoder could be loaded"):
        Encoder.load(tmp_path / "nowhere")
