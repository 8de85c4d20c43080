"""Tokens per CPU-second of the embedded engine beside padded `model.generate`, on the same model in the same run.

    python benchmarks/embedded_engine.py [--layers 6] [--hidden 256] [--conversations 16]

Two loads, one torch thread, CPU time of the process (wall time means little on a shared machine):
single: prompts of 100 to 200 tokens, 64 new tokens each; multi: 4 turns, 32 new tokens and 20 new prompt tokens a turn.
"""

import argparse
import copy
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from agentrl.engine.embedded import attention
from agentrl.engine.embedded.core import Engine
from agentrl.engine.embedded.job import Job
from agentrl.engine.embedded.params import SamplingParams
from agentrl.engine.embedded.stopping import StopRules

VOCABULARY = 4096
Generate = Callable[[Sequence[list[int]], int], list[list[int]]]


def make_model(layers: int, hidden: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


def embedded(model: Any) -> Generate:
    attention.register()
    own = copy.deepcopy(model)  # set_attn_implementation changes the shared config
    own.set_attn_implementation(attention.ATTENTION)
    engine = Engine(own, slots=64, context_length=1024)

    def generate(prompts: Sequence[list[int]], new: int) -> list[list[int]]:
        params = SamplingParams(max_new_tokens=new, temperature=0.9, top_p=0.95)
        jobs = [
            Job(str(i), ids, params, StopRules(params, eos=frozenset(), limit=new, decode=None), seed=i)
            for i, ids in enumerate(prompts)
        ]
        for job in jobs:
            engine.add(job)
        while engine.step():
            continue
        return [job.output for job in jobs]

    return generate


def padded(model: Any) -> Generate:
    def generate(prompts: Sequence[list[int]], new: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=new, do_sample=True, temperature=0.9, top_p=0.95, top_k=0
            )
        tokens: list[list[int]] = out[:, longest:].tolist()
        return tokens

    return generate


def single(generate: Generate, conversations: int) -> int:
    outputs = generate([_prompt(100 + 100 * i // conversations, i) for i in range(conversations)], 64)
    return sum(map(len, outputs))


def multi(generate: Generate, conversations: int) -> int:
    prompts = [_prompt(200, 100 + i) for i in range(conversations)]
    total = 0
    for turn in range(4):
        outputs = generate(prompts, 32)
        total += sum(map(len, outputs))
        prompts = [p + o + _prompt(20, 1000 * turn + i) for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))]
    return total


def _prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCABULARY), k=length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--conversations", type=int, default=16)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model(given.layers, given.hidden)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {given.conversations} conversations")
    for name, load in (("single turn", single), ("4 turns", multi)):
        rates = {}
        for engine, make in (("padded generate", padded), ("embedded", embedded)):
            generate = make(model)
            generate([_prompt(20, 1)] * 2, 2)
            began = time.process_time()
            tokens = load(generate, given.conversations)
            rates[engine] = tokens / (time.process_time() - began)
        ratio = rates["embedded"] / rates["padded generate"]
        print(f"{name:12}" + "".join(f"  {k} {v:8.0f} tok/CPU-s" for k, v in rates.items()) + f"  ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
