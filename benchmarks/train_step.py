"""A training step beside plain Hugging Face and AdamW on the same packed tokens, if no two samples share a prefix.

    python -m benchmarks.train_step [--repeat 7]

1. 15 samples with different prompts, 2,500 tokens in all, in one microbatch and in three; GRPO, one optimizer step, one
   thread. The peer packs the same samples (transformers makes the mask from restarting position ids). It computes
   log-probs of the responses, the same clipped loss, its gradient, gradient norm clipping, and AdamW's step.
2. Tokens per CPU second of both, alternating, the best of each; "ratio" is ours over the peer's. The losses of the
   first step must agree.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from agentrl.algorithms import AlgorithmSettings
from agentrl.sample import Sample
from agentrl.train.batch import TrainBatch
from agentrl.train.contracts import RankInfo
from agentrl.train.megatron.network import MegatronBackend
from agentrl.train.settings import TrainSettings

SIZES = {"1M": (128, 4, 384), "10M": (384, 5, 1152)}
"""Hidden size, layers and width of the feed-forward layers."""
LR = 1e-4


def make_batch(seed: int = 0) -> TrainBatch:
    """Make five groups of three samples; prompt and response have 10 to 320 tokens together."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(5):
        groups.append([Sample(group_index=g, index=3 * g + i, reward=float(rng.random())) for i in range(3)])
        for sample in groups[-1]:
            prompt, answer = (rng.integers(4, 512, int(n)).tolist() for n in rng.integers(5, 165, 2))
            sample.set_prompt_tokens(prompt)
            sample.append_model(answer, (-6 * rng.random(len(answer))).tolist(), "0", turn=1)
    return TrainBatch.from_samples(groups)


class Peer:
    """Plain transformers and torch."""

    def __init__(self, folder: Path, microbatches: Sequence[Sequence[int]]) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0)
        self.microbatches = microbatches

    def step(self, batch: TrainBatch, advantages: torch.Tensor, weights: torch.Tensor) -> float:
        total = 0.0
        self.optimizer.zero_grad()
        for samples in self.microbatches:
            ids = [torch.from_numpy(batch.sample_tokens(i).astype(np.int64)) for i in samples]
            starts = np.cumsum([0] + [len(x) for x in ids])
            positions = torch.cat([torch.arange(len(x)) for x in ids])
            logits = self.model(torch.cat(ids)[None], position_ids=positions[None], use_cache=False).logits[0]
            lengths = batch.response_lengths[list(samples)]
            rows = np.concatenate([np.arange(e - n - 1, e - 1) for e, n in zip(starts[1:], lengths, strict=True)])
            targets = torch.cat([x[len(x) - n :] for x, n in zip(ids, lengths, strict=True)])
            log_probs = logits[rows].log_softmax(-1).gather(1, targets[:, None])[:, 0]
            at = torch.from_numpy(batch.response_positions(list(samples)))
            ratio = (log_probs - log_probs.detach()).exp()
            kept = torch.minimum(ratio * advantages[at], ratio.clamp(0.8, 1.2) * advantages[at])
            loss = -(kept * weights[at]).sum()
            torch.autograd.backward(loss)
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return total


def make_model(folder: Path, hidden: int, layers: int, ffn: int) -> Path:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64,
        head_dim=32, intermediate_size=ffn, vocab_size=512, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def timed(call: Callable[[], float]) -> tuple[float, float]:
    began = time.process_time()
    result = call()
    return time.process_time() - began, result


def compare(folder: Path, name: str, budget: int, repeat: int) -> None:
    batch = make_batch()
    settings = TrainSettings(
        hf_checkpoint=str(folder), lr=LR, weight_decay=0.0, use_dynamic_batch_size=True, max_tokens_per_gpu=budget
    )
    backend = MegatronBackend(settings, AlgorithmSettings())
    backend.init(RankInfo())
    plan = backend.actor.plan(batch)
    peer = Peer(folder, plan.ranks[0])
    advantages, weights = objective(batch)
    ours, theirs = [], []
    for number in range(repeat):
        ours.append(timed(lambda n=number: dict(backend.train(batch, n))["loss"]))  # type: ignore[misc]
        theirs.append(timed(lambda: peer.step(batch, advantages, weights)))
    assert abs(ours[0][1] - theirs[0][1]) < 1e-5, (ours[0], theirs[0])
    best = [min(seconds for seconds, _ in runs) for runs in (ours, theirs)]
    rates = [len(batch.tokens) / seconds for seconds in best]
    parameters = sum(p.numel() for p in peer.model.parameters()) / 1e6
    print(
        f"| {name} ({parameters:.1f}M) | {len(plan.ranks[0])} | {rates[0]:,.0f} | {rates[1]:,.0f} "
        f"| {rates[0] / rates[1]:.2f} |",
        flush=True,
    )
    backend.close()


def objective(batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantages and weights [R] of plain GRPO."""
    lengths = torch.from_numpy(batch.response_lengths.copy())
    rewards = torch.from_numpy(batch.rewards.copy()).view(5, 3)
    relative = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    advantages = relative.flatten().repeat_interleave(lengths).float()
    return advantages, (1 / (len(batch) * lengths)).repeat_interleave(lengths).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | microbatches | agentrl, tokens per CPU second | plain HF | ratio |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for name, sizes in SIZES.items():
            folder = make_model(Path(temporary) / name, *sizes)
            for budget in (10**6, 850):
                compare(folder, name, budget, args.repeat)


if __name__ == "__main__":
    main()
