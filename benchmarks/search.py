"""Search: how often the right passage is found, how many questions one core serves, and the cost of a large index.

`python -m benchmarks.search` prints
1. recall@5 (any and all supporting paragraphs) of BM25 over HotpotQA's paragraphs, and of dense retrieval if
   `--encoder DIR` names a sentence-embedding model;
2. questions a second through `agentrl retrieval` limited to one core, asked in batches and one by one, beside direct
   calls of the index in the same run (the floor);
3. build, save and map of a synthetic index of a million passages (`--passages`), with the memory of each.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio

from agentrl.tools.search import BM25Index, DenseIndex, Encoder, Passage, RetrievalClient, load_corpus

HOTPOT = Path(__file__).parents[1] / "examples" / "search_r1" / "hotpotqa"
Search = Callable[[list[str], int], list[list[object]]]


def questions() -> list[tuple[str, set[str]]]:
    """Return HotpotQA's questions with the titles of their supporting paragraphs."""
    rows = map(json.loads, (HOTPOT / "questions.jsonl").read_text(encoding="utf-8").splitlines())
    return [(row["question"], set(row["titles"])) for row in rows]


def recall(index: BM25Index | DenseIndex, k: int = 5) -> tuple[float, float]:
    """Return the share of questions with any, and with all, supporting paragraphs among the best `k`."""
    asked = questions()
    found = [{hit.title for hit in hits} for hits in index.search([question for question, _ in asked], k)]
    any_gold = sum(bool(titles & gold) for titles, (_, gold) in zip(found, asked, strict=True))
    all_gold = sum(gold <= titles for titles, (_, gold) in zip(found, asked, strict=True))
    return any_gold / len(asked), all_gold / len(asked)


def throughput(index: BM25Index, count: int = 3_000) -> None:
    texts = [f"{question} {number}" for number in range(count // 100) for question, _ in questions()]
    start = time.perf_counter()
    index.search(texts, 3)
    floor = count / (time.perf_counter() - start)
    print(f"index called directly: {floor:,.0f} questions a second")
    paragraphs = str(HOTPOT / "paragraphs.jsonl")
    pinned = ["taskset", "-c", "0", sys.executable, "-m", "agentrl", "retrieval", "--corpus", paragraphs, "--port", "0"]
    server = subprocess.Popen(pinned, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = re.search(r"http://\S+", server.stdout.readline())
        assert url is not None
        for size, workers, name in ((64, 4, "in batches of 64"), (1, 64, "one a time by each of 64 askers")):
            rate = anyio.run(served, url.group(), texts, size, workers)
            print(f"served from one core, {name}: {rate:,.0f} a second ({rate / floor:.2f} of the floor)")
    finally:
        server.terminate()
        server.wait()


async def served(url: str, texts: list[str], size: int, workers: int) -> float:
    """Return questions a second through the server if each worker asks `size` at a time. The client may batch them."""
    parts = iter([texts[at : at + size] for at in range(0, len(texts), size)])
    async with RetrievalClient(url, cache_size=0) as client:

        async def worker() -> None:
            for part in parts:
                await client.search(part, 3)

        start = time.perf_counter()
        async with anyio.create_task_group() as group:
            for _ in range(workers):
                group.start_soon(worker)
        return len(texts) / (time.perf_counter() - start)


def synthetic(count: int) -> Iterator[Passage]:
    """Yield passages of 60 words, drawn from a vocabulary of 200,000 with Zipf frequencies."""
    import numpy as np

    rng = np.random.default_rng(0)
    vocabulary = [f"w{number}" for number in range(200_000)]
    for start in range(0, count, 10_000):
        words = np.minimum(rng.zipf(1.2, (min(10_000, count - start), 60)), len(vocabulary)) - 1
        for row, numbers in enumerate(words):
            yield Passage(str(start + row), " ".join(vocabulary[number] for number in numbers), f"Page {start + row}")


def large(count: int) -> None:
    """Measure each part in a separate process, to get the peak memory of that part."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("build", "map"):
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.search",
                    "--part",
                    part,
                    "--passages",
                    str(count),
                    "--index",
                    folder + "/i",
                ],
                check=True,
            )
        size = sum(file.stat().st_size for file in Path(folder, "i").iterdir())
        print(f"on disk: {size / 2**20:,.0f} MiB")


def part(name: str, count: int, folder: str) -> None:
    start = time.perf_counter()
    if name == "build":
        index = BM25Index.build(synthetic(count))
        built = time.perf_counter()
        index.save(folder)
        print(
            f"{count:,} passages: built in {built - start:.0f} s, saved in {time.perf_counter() - built:.0f} s, peak {memory('VmHWM'):,.0f} MiB"
        )
        return
    index = BM25Index.load(folder)
    loaded = time.perf_counter()
    print(f"mapped in {loaded - start:.2f} s, {memory('RssAnon'):,.0f} MiB of its own memory")
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(50, 200_000)}" for _ in range(5)) for _ in range(200)]
    times = []
    for text in texts:
        began = time.perf_counter()
        index.search([text], 5)
        times.append(time.perf_counter() - began)
    times.sort()
    print(
        f"a question: p50 {times[100] * 1e3:.1f} ms, p99 {times[197] * 1e3:.1f} ms; then {memory('RssAnon'):,.0f} MiB of its own"
    )


def memory(field: str) -> float:
    """Read MiB from a line of /proc/self/status: VmHWM is the peak, RssAnon leaves out mapped files."""
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", help="folder of a sentence-embedding model")
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--index", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        part(given.part, given.passages, given.index)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    corpus = list(load_corpus(HOTPOT / "paragraphs.jsonl"))
    start = time.perf_counter()
    index = BM25Index.build(corpus)
    print(f"BM25, {len(corpus)} HotpotQA paragraphs: built in {time.perf_counter() - start:.2f} s")
    print("recall@5 any {:.2f}, all {:.2f}".format(*recall(index)))
    if given.encoder:
        print(
            "dense: recall@5 any {:.2f}, all {:.2f}".format(
                *recall(DenseIndex.build(corpus, Encoder.load(given.encoder)))
            )
        )
    throughput(index)
    large(given.passages)


if __name__ == "__main__":
    main()
