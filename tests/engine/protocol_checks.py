"""Checks that every kind of engine must pass: run against the built-in server and against real SGLang."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import get_args

import anyio
import orjson
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.engine.client import PauseMode
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import HttpTransport
from agentrl.engine.weights import BroadcastUpdate, Bucket, DiskUpdate, TensorSpec, WeightGroup, buckets
from agentrl.engine.wire import Generation, SamplingParams
from agentrl.numerics.weight_group import WeightSender, views
from agentrl.run.training import free_port

PROMPT = [10, 60, 61, 62, 63, 64, 65, 66]
SHORT = SamplingParams(temperature=1.0, max_new_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=1.0, max_new_tokens=1500, ignore_eos=True)


def reference_log_probs(model: Path, prompt: list[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return log-probs of `ids` after `prompt` by a plain forward of the Hugging Face model, float32 [len(ids)]."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = network(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def check_log_probs(model: Path, got: Generation, *, tolerance: float, temperature: float = 1.0) -> None:
    """Check that the engine's log-probs equal the reference's within `tolerance`."""
    want = reference_log_probs(model, PROMPT, got.ids, temperature)
    worst = (torch.tensor(got.log_probs) - want).abs().max().item()
    assert worst <= tolerance, f"log-probs differ from the reference by {worst}"


async def check_generate(pool: EnginePool, model: Path, tolerance: float) -> None:
    """Check ids, log-probs, and stop reasons."""
    got = await pool.generate(PROMPT, SHORT, session_id="s")
    assert len(got.ids) == 12
    assert got.finish_reason.type == "length"
    assert got.prompt_tokens == len(PROMPT)
    check_log_probs(model, got, tolerance=tolerance)
    cool = SamplingParams(temperature=0.5, top_k=5, max_new_tokens=12, ignore_eos=True)
    check_log_probs(model, await pool.generate(PROMPT, cool), tolerance=tolerance, temperature=0.5)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    first = await pool.generate(PROMPT, greedy)
    stopped = await pool.generate(
        PROMPT, SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True, stop_token_ids=(first.ids[2],))
    )
    assert stopped.finish_reason.type in ("stop", "length")
    assert stopped.ids == first.ids[: len(stopped.ids)]


async def check_scores(pool: EnginePool, model: Path, tolerance: float) -> None:
    """Check log-probs of given tokens, with and without a cached prefix, and the engine's tokenizer."""
    ids = [*PROMPT, 99, 3, 407, 12, 12]
    for count in (5, 1, len(ids) - 1, 5):
        got = await pool.log_probs(ids, count, session_id="s")
        want = reference_log_probs(model, ids[:-count], ids[-count:])
        assert (torch.tensor(got) - want).abs().max().item() <= tolerance
    text = "What is 12 plus 30?<|im_end|>\n"
    want_ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    assert await pool.encode(text) == dict.fromkeys(pool.urls, want_ids)


async def check_abort(pool: EnginePool) -> None:
    """Check that an aborted request returns its tokens, with one log-prob each."""
    got: list[Generation] = []

    async def call() -> None:
        got.append(await pool.generate(PROMPT, LONG, rid="abort-me"))

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await running(pool, 1)
        await pool.abort("abort-me")
    assert got[0].finish_reason.type == "abort"
    assert len(got[0].ids) == len(got[0].log_probs) < 1500


async def check_cancel(pool: EnginePool) -> None:
    """Check that a cancelled call leaves no request running."""
    async with anyio.create_task_group() as group:
        group.start_soon(pool.generate, PROMPT, LONG)
        await running(pool, 1)
        group.cancel_scope.cancel()
    await running(pool, 0)


async def check_update_in_flight(
    pool: EnginePool, model: Path, other: Path, tolerance: float, running: Callable[[int], Awaitable[None]]
) -> None:
    """Check that a call continues after a pause and an update. Each token must have the right version and log-prob."""
    await pool.receive(DiskUpdate(str(model)), "one")
    exact = pool.settings.pause_generation_mode != "in_place"
    got: list[Generation] = []

    async def call() -> None:
        got.append(await pool.generate(PROMPT, LONG, session_id="in-flight"))

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await running(1)
        await pool.pause()
        await running(0)
        await pool.resume()
        await running(1)
        await pool.receive(DiskUpdate(str(other)), "two")
    answer = got[0]
    assert answer.finish_reason.type == "length"
    assert [version for version, _, _ in answer.weight_versions] == ["one", "two"]
    assert len(answer.ids) == len(answer.log_probs) == answer.weight_versions[-1][2] == 1500
    for folder, (_, start, end) in zip((model, other), answer.weight_versions, strict=True):
        if exact or folder == model:
            want = reference_log_probs(folder, PROMPT, answer.ids)[start:end]
            worst = (torch.tensor(answer.log_probs[start:end]) - want).abs().max().item()
            assert worst <= tolerance, f"log-probs of tokens {start} to {end} differ from the reference by {worst}"


async def check_every_mode(pool: EnginePool, model: Path, other: Path, tolerance: float) -> None:
    """Check updates in flight with each `--pause-generation-mode`."""
    for mode in get_args(PauseMode):
        settings = pool.settings.model_copy(update={"pause_generation_mode": mode})
        async with EnginePool(pool.urls, settings, vocab_size=512) as another:
            await check_update_in_flight(another, model, other, tolerance, partial(running, another))


async def check_broadcast(pool: EnginePool, model: Path, tolerance: float, backend: str = "gloo") -> None:
    """Check new weights in flat buckets from rank 0, which is this process."""
    weights = load_file(model / "model.safetensors")
    port = free_port()
    specs = [
        TensorSpec(name, str(each.dtype).removeprefix("torch."), list(each.shape)) for name, each in weights.items()
    ]
    cut = buckets(specs, sum(spec.nbytes for spec in specs) // 3)
    assert 2 < len(cut) < len(specs)
    name, engines = f"agentrl_{port}", len(pool.urls)
    size = max(sum(spec.nbytes for spec in bucket) for bucket in cut)
    joined: list[WeightSender] = []

    def join() -> None:
        joined.append(WeightSender(backend, f"tcp://127.0.0.1:{port}", engines + 1, name, size))

    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, join)
        await pool.join_weight_group(
            WeightGroup(0, size, "127.0.0.1", port, engines + 1, name, backend, 1, await pool.epoch())
        )

    def send() -> None:
        for bucket in cut:
            flat = joined[0].buffer(sum(spec.nbytes for spec in bucket), torch.device("cpu"))
            for name, view in views(flat, bucket):
                view.copy_(weights[name])
            joined[0].send(flat)

    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, send)
        await pool.receive(BroadcastUpdate([Bucket(name, bucket) for bucket in cut]), backend)
    await pool.leave_weight_group(name)
    assert pool.version == backend
    got = await pool.generate(PROMPT, SHORT)
    assert got.weight_version == backend
    check_log_probs(model, got, tolerance=tolerance)


async def running(pool: EnginePool, count: int, timeout: float = 20.0) -> None:
    """Wait until the first engine reports this many running requests."""
    async with HttpTransport(EngineSettings()) as transport:
        with anyio.fail_after(timeout):
            while True:
                _, raw, *_ = await transport.exchange("GET", pool.urls[0] + "/v1/loads?include=core")
                if orjson.loads(raw)["loads"][0]["num_running_reqs"] == count:
                    return
