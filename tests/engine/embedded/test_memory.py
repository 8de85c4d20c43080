"""Offload and onload of the engine's memory: it leaves the process, and the weights come back bit for bit."""

import tempfile
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from agentrl.engine.embedded.weights import WeightUpdater
from agentrl.serving.http import RequestError
from tests.engine.embedded.driver import make_engine, make_job, prompt, run
from tests.support.tiny_models import make_tiny_model

MB = 1 << 20


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_weights_and_cache_leave_the_process_and_come_back_the_same(tmp_path: Path) -> None:
    engine = make_engine(make_tiny_model(tmp_path / "model", hidden_size=1024), slots=2, context=2048)
    weights = WeightUpdater(engine.model)
    size = sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in engine.model.state_dict().values()}.values())
    assert size > 70 * MB
    before, sums = make_job(prompt(40)), weights.checksums(engine)
    run(engine, before)
    caches = [*engine.cache.keys, *engine.cache.values]
    cached = sum(cache.fill_(1).nbytes for cache in caches)
    caches.clear()
    full = resident()
    weights.release(engine, ["kv_cache"])
    assert full - resident() > 0.9 * cached > 20 * MB
    weights.release(engine, ["kv_cache", "weights"])
    assert full - resident() > 0.9 * (cached + size)
    waiting = make_job(prompt(40))
    engine.add(waiting)
    assert not engine.step()
    with pytest.raises(RequestError, match="resume_memory_occupation first"):
        weights.write(engine, [], "1")
    weights.resume(engine, ["weights"])
    assert weights.checksums(engine) == sums
    assert not engine.step(), "there is nowhere to write keys and values to"
    weights.resume(engine, ["kv_cache", "weights"])
    run(engine)
    assert (waiting.output, waiting.log_probs) == (before.output, before.log_probs)


def test_nothing_is_taken_away_while_requests_run_or_where_it_does_not_fit(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, job = make_engine(folder()), make_job(prompt(20))
    weights = WeightUpdater(engine.model)
    engine.add(job)
    engine.step()
    with pytest.raises(RequestError, match="requests are running"):
        weights.release(engine, ["kv_cache"])
    run(engine)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Path("/dev/full").open("wb"))  # noqa: SIM115 - closed with what holds it
    with pytest.raises(RequestError, match="could not be offloaded: .*No space left"):
        weights.release(engine, ["weights"])
    again = make_job(prompt(20))
    run(engine, again)
    assert again.output == job.output


def test_over_http(server: str) -> None:
    def post(path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(server + path, json=body)

    info = httpx.get(f"{server}/server_info").json()
    assert info["enable_memory_saver"]
    assert post("/release_memory_occupation", {"tags": ["graphs"]}).status_code == 400
    assert post("/release_memory_occupation", {}).json() is None
    assert httpx.get(f"{server}/health").status_code == 200
    refused = post("/weights_checker", {"action": "checksum"})
    assert refused.status_code == 400
    assert "memory was released" in refused.text
    assert post("/resume_memory_occupation", {"tags": None}).json() is None
    answer = post("/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}).json()
    assert len(answer["output_ids"]) == 4
