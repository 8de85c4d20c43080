"""The engine without a server: make jobs, step until done."""

import random
from pathlib import Path
from typing import Any

from agentrl.engine.embedded.core import Engine
from agentrl.engine.embedded.model import load_model
from agentrl.engine.embedded.params import RequestSampling
from agentrl.engine.embedded.sequence import SequenceState, Wanted
from agentrl.engine.embedded.stopping import StopRules


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
    """What a plain forward pass over prompt and output says about the sampled tokens."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([job.prompt + job.output])).logits[0] / temperature
    rows = logits.log_softmax(-1)
    start = len(job.prompt) - 1
    return [rows[start + i, token].item() for i, token in enumerate(job.output)]
