"""One optimizer step on a GPU, old log-probs included, against plain transformers in the same process.

Run: python -m benchmarks.trainer_gpu [--groups 8] [--per-group 8] [--prompt 512] [--answer 1024]

A random model of Qwen3-0.6B's shape in bfloat16. Both sides compute the log-probs of all answers, then train one step.
transformers gets batches without padding (all samples have one length), torch's fused attention and Adam.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.algorithms import AlgorithmSettings
from agentrl.sample import Sample
from agentrl.tiny import create
from agentrl.train.batch import TrainBatch
from agentrl.train.contracts import RankInfo
from agentrl.train.megatron.network import MegatronBackend
from agentrl.train.settings import TrainSettings

SHAPE = Qwen3Config(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
    max_position_embeddings=40960,
)
ROWS = 4  # of transformers' batches


def make_batch(groups: int, per_group: int, prompt: int, answer: int) -> TrainBatch:
    rng = np.random.default_rng(0)
    made: list[list[Sample]] = []
    for group in range(groups):
        start = rng.integers(10, 150_000, prompt).tolist()
        made.append([])
        for number in range(per_group):
            sample = Sample(group_index=group, index=group * per_group + number, reward=float(rng.random()))
            sample.set_prompt_tokens(start)
            sample.append_model(rng.integers(10, 150_000, answer).tolist(), (-3 * rng.random(answer)).tolist(), "1")
            made[-1].append(sample)
    return TrainBatch.from_samples(made)


def seconds(step: Callable[[int], Mapping[str, float] | None]) -> tuple[float, float]:
    """Return the seconds of the third step, after two warm-up steps, and its peak memory in GB."""
    for number in range(3):
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        said = step(number)
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    # Our own step reads the peak, and resets it.
    most = max((said or {}).get("perf/gpu_memory_allocated", 0) * 2**30, torch.cuda.max_memory_allocated())
    return took, most / 1e9


def plain(model: Qwen3ForCausalLM, ids: torch.Tensor, prompt: int) -> Callable[[int], None]:
    """Compute log-probs and a policy-gradient step with transformers alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def log_probs(rows: torch.Tensor) -> torch.Tensor:
        logits = model(rows).logits[:, prompt - 1 : -1]
        found = [
            x.float().log_softmax(-1).gather(-1, y[:, None])[:, 0]
            for x, y in zip(logits, rows[:, prompt:], strict=True)
        ]
        return torch.stack(found)

    def step(_: int) -> None:
        chunks = ids.split(ROWS)
        with torch.no_grad():
            old = [log_probs(rows) for rows in chunks]
        for rows, before in zip(chunks, old, strict=True):
            torch.autograd.backward(-(log_probs(rows) - before).exp().mean() / len(chunks))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in (("groups", 8), ("per-group", 8), ("prompt", 512), ("answer", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    batch = make_batch(args.groups, args.per_group, args.prompt, args.answer)
    tokens = len(batch) * (args.prompt + args.answer)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(SHAPE).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as temporary:
        folder, other = Path(temporary) / "model", Path(temporary) / "tokenizer"
        create(other)
        model.save_pretrained(folder)
        for file in other.glob("*token*"):
            shutil.copy(file, folder)
        for shared in (True, False):
            train = TrainSettings(
                hf_checkpoint=str(folder),
                lr=1e-6,
                use_dynamic_batch_size=True,
                max_tokens_per_gpu=16384,
                share_prefixes=shared,
            )
            backend = MegatronBackend(train, AlgorithmSettings(), device="cuda")
            backend.init(RankInfo())
            show(f"agentrl, prefixes shared: {shared}", seconds(partial(backend.train, batch)), tokens)
            backend.close()
    ids = torch.tensor(np.stack([batch.sample_tokens(i) for i in range(len(batch))]).astype(np.int64), device="cuda")
    show("transformers", seconds(plain(model.cuda(), ids, args.prompt)), tokens)


def show(name: str, measured: tuple[float, float], tokens: int) -> None:
    took, most = measured
    print(f"{name:32} {took:6.2f} s {tokens / took:9,.0f} tokens/s, at most {most:.0f} GB")


if __name__ == "__main__":
    main()
