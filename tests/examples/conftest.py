"""What the examples' tests share: every id that the engine returned, recorded on the wire."""

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from agentrl import Sample
from agentrl.engine.transport import Transport

Exchange = tuple[list[int], list[int]]


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    """Every `/generate` exchange: the ids that were sent, and the ids that came back."""
    seen: list[Exchange] = []
    exchange = Transport.exchange

    async def recorded(self: Transport, method: str, url: str, body: Any = None, headers: Any = None) -> Any:
        status, raw = await exchange(self, method, url, body, headers)
        if url.endswith("/generate"):
            assert status == 200
            seen.append((orjson.loads(body)["input_ids"], orjson.loads(raw)["output_ids"]))
        return status, raw

    monkeypatch.setattr(Transport, "exchange", recorded)
    return seen


def check_who_wrote_each_token(samples: Sequence[Sample], exchanges: Sequence[Exchange]) -> None:
    """The loss mask is 1 exactly where an exchange put its ids, and no exchange is left over."""
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
