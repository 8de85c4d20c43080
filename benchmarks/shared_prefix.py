"""Time saved by computing a group's prompt once, beside the share of multiplications that remains.

    python -m benchmarks.shared_prefix [--response 64] [--groups 4] [--hidden 256] [--layers 4] [--repeat 5]

1. The same batch goes through the trainer's forward and backward pass twice, with and without `--share-prefixes`, in
   one microbatch and thread, alternately. The least CPU time of each counts. One token a sample trains, so that nearly
   all of the time is that of the layers.
2. Work is counted in multiplications of the layers: of linear layers by tokens, of attention by pairs of a query and a
   key that it attends to. "over" is the remaining share of time divided by the remaining share of work.
3. Log-probs are compared in float64, gradients in float32 (relative to their norm). Memory is the peak that a pass adds.
"""

import argparse
import ctypes
import dataclasses
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.algorithms import AlgorithmSettings
from agentrl.sample import Sample
from agentrl.train.batch import TrainBatch
from agentrl.train.contracts import RankInfo
from agentrl.train.megatron.network import MegatronBackend
from agentrl.train.microbatches import inputs_of
from agentrl.train.objective import step_inputs
from agentrl.train.packing import PackingPlan, make_plan
from agentrl.train.settings import TrainSettings
from agentrl.train.tree import SharedPrefixes, Tree


def make_batch(groups: int, size: int, prompt: int, response: int, trained: int | None = None) -> TrainBatch:
    """Make groups of `size` samples with one prompt each. Responses have .5 to 1.5 times `response` tokens."""
    rng = np.random.default_rng(0)
    out = []
    for g in range(groups):
        shared = rng.integers(4, 512, prompt).tolist()
        out.append([Sample(group_index=g, index=g * size + i, reward=float(rng.random())) for i in range(size)])
        for sample in out[-1]:
            ids = rng.integers(4, 512, max(2, int(response * (0.5 + rng.random())))).tolist()
            sample.set_prompt_tokens(shared)
            sample.append_model(ids, (-6 * rng.random(len(ids))).tolist(), "0", turn=1)
    batch = TrainBatch.from_samples(out)
    if trained is None:
        return batch
    mask = np.concatenate([np.arange(n) < trained for n in batch.response_lengths]).astype(np.uint8)
    return dataclasses.replace(batch, loss_mask=mask)


def work(tree: Tree, linear: int, width: int) -> float:
    """Return the multiplications of the layers for a tree: `linear` for a token and `2 * width` for a pair."""
    pairs = sum(sum(range(node.start + 1, node.end + 1)) for node in tree.nodes)
    return tree.tokens * linear + pairs * 2 * width


class Trainer:
    """One backend, and its passes over a batch in one microbatch, with and without shared prefixes."""

    def __init__(self, folder: Path) -> None:
        self.backend = MegatronBackend(TrainSettings(hf_checkpoint=str(folder)), AlgorithmSettings(use_kl_loss=True))
        self.backend.init(RankInfo())
        assert self.backend.reference is not None
        network: Any = self.backend.reference.network
        self.double = network.passes  # the same model a second time
        self.double.model.double()
        network.config.params_dtype = torch.float64

    def plan(self, batch: TrainBatch, share: bool) -> PackingPlan:
        inputs = inputs_of(batch)
        prefixes = SharedPrefixes.of(inputs) if share else None
        return make_plan([len(ids) for ids in inputs], 1, prefixes=prefixes, max_tokens=10**9)

    def gradients(self, batch: TrainBatch, share: bool) -> tuple[float, torch.Tensor]:
        """Return the CPU seconds of a forward and backward pass, and its gradient as one vector."""
        slot, algorithm = self.backend.actor, self.backend.algorithm
        count, backend = len(batch.loss_mask), self.backend
        advantages, ref = np.linspace(-1, 1, count, dtype=np.float32), np.zeros(count, np.float32)
        whole = replace(batch, advantages=advantages, ref_log_probs=ref)
        inputs = step_inputs(whole, np.arange(len(batch)), algorithm, backend.ranks, backend.device)
        slot.network.zero_grad()
        began = time.process_time()
        slot.forward_backward.gradients(self.plan(inputs.batch, share), inputs)
        seconds = time.process_time() - began
        return seconds, torch.cat([p.main_grad.flatten() for p in slot.network.model.parameters()])

    def log_probs(self, batch: TrainBatch, share: bool) -> np.ndarray[Any, Any]:
        """Return log-probs in float64."""
        found: np.ndarray[Any, Any] = self.double.log_probs(batch, self.plan(batch, share), "response")
        return found


def make_model(folder: Path, hidden: int, layers: int) -> Path:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64,
        head_dim=32, intermediate_size=3 * hidden, vocab_size=512, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def peak(trainer: Trainer, batch: TrainBatch, share: bool) -> float:
    """Return the MiB that a pass adds to the resident set at its peak."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    trainer.gradients(batch, share)
    return resident("VmHWM") - before


def resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192, help="about as many, unshared, in a batch")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_model(Path(temporary) / "model", args.hidden, args.layers)
        run(folder, args)


def run(folder: Path, args: argparse.Namespace) -> None:
    trainer, ways = Trainer(folder), (False, True)
    linear = 4 * args.hidden * args.hidden // 4 * 3 + 9 * args.hidden * args.hidden  # q, k, v, out; gate, up, down
    print(
        f"hidden {args.hidden}, {args.layers} layers, responses of about {args.response} tokens, {args.repeat} passes\n"
    )
    print("| group | prompt | tokens left | work left | time left | over | log-probs | gradient | MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for size in (8, 16):
        for factor in (0.5, 2, 8):
            prompt = int(args.response * factor)
            count = max(1, args.tokens // (size * (prompt + args.response)))
            batch = make_batch(count, size, prompt, args.response, trained=1)
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(args.repeat):
                for share in ways:
                    seconds[share].append(trainer.gradients(batch, share)[0])
            left = min(seconds[True]) / min(seconds[False])
            inputs = inputs_of(batch)
            lengths = [len(ids) for ids in inputs]
            trees = [Tree.of(lengths, p) for p in (SharedPrefixes.none(len(inputs)), SharedPrefixes.of(inputs))]
            tokens = trees[1].tokens / trees[0].tokens
            share_of_work = work(trees[1], linear, args.hidden) / work(trees[0], linear, args.hidden)
            whole = make_batch(1, size, prompt, args.response)
            log_probs = [trainer.log_probs(whole, share) for share in ways]
            grads = [trainer.gradients(whole, share)[1].clone() for share in ways]
            apart = float((grads[0] - grads[1]).norm() / grads[0].norm())
            memory = [peak(trainer, batch, share) for share in ways]
            print(
                f"| {size} | {factor:g} | {tokens:.2f} | {share_of_work:.3f} | {left:.3f} | {left / share_of_work:.2f} "
                f"| {np.abs(log_probs[0] - log_probs[1]).max():.0e} | {apart:.0e} | {memory[0]:.0f} -> {memory[1]:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
