"""`agentrl retrieval`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentrl.cli.main import debug_option
from agentrl.cli.serve import check_port
from agentrl.errors import SettingsError

if TYPE_CHECKING:
    from agentrl.tools.search import BM25Index, DenseIndex


@click.command("retrieval", context_settings={"max_content_width": 100, "show_default": True})
@click.option("--corpus", type=click.Path(path_type=Path), help="Passages: .jsonl or .parquet with text, id, title.")
@click.option("--index", type=click.Path(path_type=Path), help="Folder of the index; built from --corpus if it is new.")
@click.option("--encoder", type=click.Path(path_type=Path), help="Search by meaning: the folder of an encoder model.")
@click.option(
    "--topk", default=3, type=click.IntRange(1), metavar="N", help="Passages a query where a request does not say."
)
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on.")
@click.option(
    "--port", default=8000, type=click.IntRange(0, 65535), metavar="PORT", help="Port to listen on; 0 takes a free one."
)
@click.option(
    "--concurrency", default=4, type=click.IntRange(1), metavar="N", help="Requests that are searched at once."
)
@debug_option
def command(
    corpus: Path | None, index: Path | None, encoder: Path | None, topk: int, host: str, port: int, concurrency: int
) -> int:
    """Serve passages over HTTP, in the form that Search-R1's retrieval servers speak.

    POST /retrieve with {"queries": [...], "topk": 3, "return_scores": true}.

    \b
    The first of these builds the index and serves it, the second only serves it:
        agentrl retrieval --corpus wiki.jsonl --index wiki-index
        agentrl retrieval --index wiki-index
    """
    if corpus is None and index is None:
        raise SettingsError("nothing to serve; give --corpus FILE, --index DIR, or both to keep the index")
    port = check_port(host, port)
    import starlette  # noqa: F401  # missing ones show before the index is built
    import uvicorn

    from agentrl.tools.search.server import application

    found = _dense(corpus, index, encoder) if encoder is not None else _bm25(corpus, index)
    click.echo(f"{len(found)} passages on http://{host}:{port}/retrieve")
    uvicorn.run(application(found, topk=topk, concurrency=concurrency), host=host, port=port, log_level="warning")
    return 0


def _bm25(corpus: Path | None, folder: Path | None) -> "BM25Index":
    from agentrl.tools.search import BM25Index, load_corpus

    if folder is not None and (corpus is None or folder.exists()):
        return BM25Index.load(folder)
    assert corpus is not None
    index = BM25Index.build(load_corpus(corpus))
    if folder is None:
        return index
    index.save(folder)
    return BM25Index.load(folder)


def _dense(corpus: Path | None, folder: Path | None, encoder: Path) -> "DenseIndex":
    from agentrl.tools.search import DenseIndex, Encoder, load_corpus

    model = Encoder.load(encoder)
    if folder is not None and (corpus is None or folder.exists()):
        return DenseIndex.load(folder, model)
    assert corpus is not None
    index = DenseIndex.build(load_corpus(corpus), model)
    if folder is not None:
        index.save(folder)
    return index
