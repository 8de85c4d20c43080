"""Shared parts of the examples' tests: groups of an example's prompts, and a log of every id that the engine returned.

A test module has a module-scoped fixture `model`, the folder that `server` serves.
"""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from agentrl import Sample
from agentrl.engine.pool import EnginePool
from agentrl.engine.transport import HttpTransport, Reply
from tests.rollout.scripted import Store
from tests.support.embedded_server import embedded_server

Exchange = tuple[list[int], list[int]]
GROUPS, SIZE = 25, 8


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    with embedded_server(model, "--dtype", "float32", "--slots", "64") as url:
        yield url


@pytest.fixture
async def pool(server: str) -> AsyncIterator[EnginePool]:
    async with EnginePool([server], vocab_size=None) as pool:
        yield pool


class Questions(Store):
    """`GROUPS` groups of `SIZE` samples from a prompt file of an example."""

    def __init__(self, prompts: Path) -> None:
        super().__init__(groups=GROUPS, size=SIZE)
        self.rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]

    def lease(self, n: int, step: int) -> list[list[Sample]]:
        groups = super().lease(n, step)
        for group in groups:
            for sample in group:
                row = self.rows[sample.group_index or 0]
                sample.prompt, sample.label = row["prompt"], row["label"]
                sample.metadata = dict(row.get("metadata", {}))
        return groups


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    """Record every `/generate` exchange: the ids that were sent, and the ids that came back."""
    seen: list[Exchange] = []
    exchange = HttpTransport.exchange

    async def recorded(self: HttpTransport, method: str, url: str, body: Any = None, *rest: Any) -> Reply:
        reply = await exchange(self, method, url, body, *rest)
        if url.endswith("/generate"):
            assert reply.status == 200
            seen.append((orjson.loads(body)["input_ids"], orjson.loads(reply.body)["output_ids"]))
        return reply

    monkeypatch.setattr(HttpTransport, "exchange", recorded)
    return seen


def check_who_wrote_each_token(samples: Sequence[Sample], exchanges: Sequence[Exchange]) -> None:
    """Check that the loss mask is 1 exactly where an exchange put its ids, and that no exchange is unused."""
    for sample in samples:
        sample.validate()
        tokens, written = sample.tokens, [0] * len(sample.tokens)
        for sent, got in exchanges:
            end = len(sent) + len(got)
            if tokens[:end] == sent + got:
                written[len(sent) : end] = [1] * len(got)
        for at, (mask, engine) in enumerate(zip(sample.loss_mask or (), written[sample.prompt_length :], strict=True)):
            assert mask == engine, f"token {at} of sample {sample.index}'s response"
        assert not any(written[: sample.prompt_length])
    assert sum(len(got) for _, got in exchanges) == sum(sum(sample.loss_mask or ()) for sample in samples)
