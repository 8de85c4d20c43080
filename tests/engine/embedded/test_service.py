"""Requests in flight: what a stream is told of its jobs."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from agentrl.engine.embedded.request import GenerateBody, GenerateRequest
from agentrl.engine.embedded.service import EngineService, RequestInFlight
from tests.engine.embedded.driver import make_job


async def test_an_end_is_told_once() -> None:
    """The engine's thread may end a job between the note of its last but one token and the look at it."""
    job = make_job([1, 2])
    vocab = SimpleNamespace(decode=lambda ids, _: "x" * len(ids))
    service: Any = SimpleNamespace(live=Counter[str](), vocab=vocab, engine=SimpleNamespace(version="1"))
    call = RequestInFlight(
        cast(EngineService, service), GenerateRequest(GenerateBody(stream=True), [job], ["job"], True)
    )
    assert job.on_token is not None
    assert job.on_finish is not None
    told = list[dict[str, Any]]()
    job.on_token(job)
    async for index in call.progress():
        if not told:
            job.output, job.log_probs, job.finish = [5], [-0.5], {"type": "length", "length": 1}
            job.on_finish(job)
        told.append(call.answer(index))
    assert [(answer["text"], answer["meta_info"]["finish_reason"]["type"]) for answer in told] == [("x", "length")]
