"""The engine without a server: make jobs, and step until they are done."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.engine.embedded.core import Engine
from agentrl.engine.embedded.model import load_model
from agentrl.engine.embedded.sequence import SequenceState, Wanted
from agentrl.engine.embedded.stopping import StopRules
from agentrl.engine.request_sampling import RequestSampling
from agentrl.numerics.vision import Vision
from agentrl.sample import Origin, Sample
from tests.support.vision import IMAGE_PAD, ROWS


def make_engine(folder: Path, *, slots: int = 8, context: int = 512, chunk: int = 64) -> Engine:
    model = load_model(str(folder), dtype="float32", device="cpu", trust_remote_code=False)
    return Engine(model, slots=slots, context_length=context, chunk=chunk)


def make_job(prompt: list[int], *, seed: int = 1, want: Wanted | None = None, **params: Any) -> SequenceState:
    sampling = RequestSampling.decode({"max_new_tokens": 12, **params}, vocab_size=512)
    rules = StopRules(sampling, eos=frozenset(), limit=sampling.max_new_tokens or 0, decode=None)
    return SequenceState("job", prompt, sampling, rules, seed, want or Wanted())


def run(engine: Engine, *jobs: SequenceState) -> None:
    for job in jobs:
        engine.add(job)
    while engine.step():
        continue


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 512), k=length)


def reference_log_probs(model: Any, job: SequenceState, temperature: float = 1.0) -> list[float]:
    """Return the log-probs of the sampled tokens by a plain forward pass over prompt and output."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([job.prompt + job.output])).logits[0] / temperature
    rows = logits.log_softmax(-1)
    start = len(job.prompt) - 1
    return [rows[start + i, token].item() for i, token in enumerate(job.output)]


TWIN = ROWS - 1
"""An id with the placeholder's embedding, for the reference, in which every placeholder must be an image."""


def seeing_model(folder: Path) -> Any:
    """Load a vision model with transformers, in float32. Its input and output embeddings must not be tied."""
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32").eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[TWIN] = model.get_input_embeddings().weight[IMAGE_PAD]
    return model


def seeing_log_probs(
    model: Any, prompt: list[int], output: list[int], spans: Sequence[tuple[int, int]], pixels: Sequence[dict[str, Any]]
) -> list[float]:
    """Return the log-probs of the sampled tokens by transformers' forward pass over all ids and pixels."""
    import torch

    ids = torch.tensor([prompt + output])
    assert not (ids == TWIN).any()
    kinds = torch.zeros_like(ids)
    for start, end in spans:
        kinds[0, start:end] = 1
    ids[(ids == IMAGE_PAD) & (kinds == 0)] = TWIN
    whole = {name: torch.cat([each[name] for each in pixels]) for name in ("pixel_values", "image_grid_thw")}
    with torch.inference_mode():
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **whole).logits[0]
    rows, start = logits.log_softmax(-1), len(prompt) - 1
    return [rows[start + i, token].item() for i, token in enumerate(output)]


def check_seen(sample: Sample, folder: Path, model: Any | None = None) -> None:
    """Check that each turn's log-probs are transformers', with the images before the turn; `model` is of `folder`."""
    model, vision = model or seeing_model(folder), Vision.load(folder)
    assert vision is not None
    assert sample.rollout_log_probs is not None
    ids, start = list(sample.tokens), len(sample.tokens) - sample.response_length
    for segment in sample.segments:
        if segment.origin == Origin.MODEL:
            begin, end = segment.start + start, segment.end + start
            seen = [span for span in sample.image_spans if span.end <= begin]
            spans = [(span.start, span.end) for span in seen]
            pixels = [vision.pixels([sample.images[span.hash]]) for span in seen]
            expected = seeing_log_probs(model, ids[:begin], ids[begin:end], spans, pixels)
            assert list(sample.rollout_log_probs[segment.start : segment.end]) == pytest.approx(expected, abs=1e-5)
