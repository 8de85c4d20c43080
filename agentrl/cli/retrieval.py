"""`agentrl retrieval`."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentrl.errors import SettingsError

if TYPE_CHECKING:
    from agentrl.tools.search import BM25Index, DenseIndex, Passage


@click.command("retrieval", context_settings={"show_default": True})
@click.option("--corpus", type=click.Path(path_type=Path), help="Passages: .jsonl or .parquet with text, id, title.")
@click.option("--index", type=click.Path(path_type=Path), help="Folder of the index; built from --corpus if it is new.")
@click.option("--encoder", type=click.Path(path_type=Path), help="Search by meaning: the folder of an encoder model.")
@click.option("--topk", default=3, type=click.IntRange(1), metavar="N", help="Passages a query, if it names none.")
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), metavar="PORT", help="0 takes a free one.")
@click.option("--concurrency", default=4, type=click.IntRange(1), metavar="N", help="Requests searched at once.")
def command(
    corpus: Path | None, index: Path | None, encoder: Path | None, topk: int, host: str, port: int, concurrency: int
) -> int:
    """Serve passages over HTTP, in the form that Search-R1's retrieval servers speak.

    POST /retrieve with {"queries": [...], "topk": 3, "return_scores": true}.

    \b
    The first of these builds the index and serves it, the second only serves it:
        agentrl retrieval --corpus wiki.jsonl --index wiki-index
        agentrl retrieval --index wiki-index"""
    if corpus is None and index is None:
        raise SettingsError("nothing to serve; give --corpus FILE, --index DIR, or both to keep the index")
    from agentrl.serving import server as serving
    from agentrl.tools.search.server import application

    listener = serving.listen(host, port)
    found = _index(corpus, index, encoder)
    ready = f"{len(found)} passages on {{url}}/retrieve"
    serving.serve(application(found, topk=topk, concurrency=concurrency), listener, host, ready=ready)
    return 0


def _index(corpus: Path | None, folder: Path | None, encoder: Path | None) -> "BM25Index | DenseIndex":
    from agentrl.tools.search import BM25Index, DenseIndex, Encoder, load_corpus

    load: Callable[[Path], BM25Index | DenseIndex] = BM25Index.load
    build: Callable[[Iterator[Passage]], BM25Index | DenseIndex] = BM25Index.build
    if encoder is not None:
        model = Encoder.load(encoder)
        load, build = partial(DenseIndex.load, encoder=model), partial(DenseIndex.build, encoder=model)
    if folder is not None and (corpus is None or folder.exists()):
        return load(folder)
    assert corpus is not None
    index = build(load_corpus(corpus))
    if folder is None:
        return index
    index.save(folder)
    return load(folder)
