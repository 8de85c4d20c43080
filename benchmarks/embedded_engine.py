"""Tokens per CPU-second of the embedded engine, of padded `model.generate`, and of a bound that no engine can beat.

    python -m benchmarks.embedded_engine [--sizes .85M 7M 29M] [--models random trained] [--loads single multi siblings]

1. Loads: `single`, prompts of 100 to 200 tokens, 64 new ones; `multi`, 4 turns, 32 new tokens and 20 new prompt tokens a
   turn; `siblings`, groups of 8 that share a prompt of 128 tokens, 64 new ones each. Temperature 0.9, top-p 0.95.
2. Models: Qwen3 with a vocabulary of 4096. `random` has flat distributions. `trained` memorized a page of `docs/` in
   40 steps of AdamW and continues pieces of that page: its distributions are peaked.
3. The bound is only the matrix products and the attention of the same load, in the fastest forms that we know.
   Sequences are in lockstep, each shared prefix is computed once. No norms, RoPE, activations, sampling or other loop.
4. One torch thread; CPU time of the process. The three alternate, and the median ratio counts. Wall time and absolute
   rates mean little on a shared machine. The first round of each is left out: it touches new memory, which is slow.
"""

import argparse
import copy
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from agentrl.engine.embedded import kernels
from agentrl.engine.embedded.core import Engine
from agentrl.engine.embedded.model import for_serving
from agentrl.engine.embedded.sequence import SequenceState
from agentrl.engine.embedded.stopping import StopRules
from agentrl.engine.request_sampling import RequestSampling

VOCABULARY, CONTEXT, GROUP = 4096, 1024, 8
SIZES = {".85M": (4, 96), "7M": (6, 256), "29M": (8, 512)}
"""Layers and hidden size."""
Ids = list[int]
Generate = Callable[[Sequence[Ids], int], list[Ids]]


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
        tie_word_embeddings=hidden < 256,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


def text() -> Ids:
    """Return the words of docs/ as ids, the most frequent first."""
    words = " ".join(file.read_text() for file in sorted(Path(__file__).parents[1].glob("docs/*.md"))).split()
    known = {word: i for i, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1), start=1)}
    return [known[word] for word in words if word in known]


def train(model: Any, ids: Ids, steps: int = 40) -> float:
    """Memorize the beginning of `ids`. Returns the mean entropy of the next token there, in nats."""
    page = torch.tensor(ids[:256]).reshape(4, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=page, labels=page).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.inference_mode():
        return float(torch.distributions.Categorical(logits=model(input_ids=page).logits).entropy().mean())


class Embedded:
    """The engine; `fresh` empties its caches."""

    def __init__(self, model: Any) -> None:
        own = copy.deepcopy(model)  # the attention's name is written into the shared config
        self.engine = Engine(for_serving(own), slots=64, context_length=CONTEXT)

    def fresh(self) -> None:
        self.engine.flush()

    def generate(self, prompts: Sequence[Ids], new: int) -> list[Ids]:
        params = RequestSampling(max_new_tokens=new, temperature=0.9, top_p=0.95)
        jobs = [
            SequenceState(str(i), ids, params, StopRules(params, eos=frozenset(), limit=new, decode=None), seed=i)
            for i, ids in enumerate(prompts)
        ]
        for job in jobs:
            self.engine.add(job)
        while self.engine.step():
            continue
        return [job.output for job in jobs]


class Padded:
    """transformers alone: one padded batch, no cache between turns."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def fresh(self) -> None:
        pass

    def generate(self, prompts: Sequence[Ids], new: int) -> list[Ids]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=new, do_sample=True, temperature=0.9, top_p=0.95, top_k=0
            )
        tokens: list[Ids] = out[:, longest:].tolist()
        return tokens


class Bound:
    """Only the matrix products and the attention."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self.kv, self.groups = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
        self.dim, self.layers = config.head_dim, config.num_hidden_layers
        products: list[tuple[Any, ...]] = []
        for layer in model.model.layers:
            own, mlp = layer.self_attn, layer.mlp
            products += [
                (own.q_proj, own.k_proj, own.v_proj),
                (own.o_proj,),
                (mlp.gate_proj, mlp.up_proj),
                (mlp.down_proj,),
            ]
        self.weights = [torch.cat([part.weight.detach() for part in parts]) for parts in products]
        self.head = model.lm_head.weight.detach()
        self.keys, self.values = (torch.zeros(self.layers, 64, self.kv, CONTEXT, self.dim) for _ in range(2))
        self.read: list[Ids] = []

    def fresh(self) -> None:
        self.read.clear()

    def generate(self, prompts: Sequence[Ids], new: int) -> list[Ids]:
        spans = []
        for prompt in prompts:
            spans.append(
                (min(max((_common(prompt, old) for old in self.read), default=0), len(prompt) - 1), len(prompt))
            )
            self.read.append(prompt)
        rows = torch.randn(new * len(prompts), VOCABULARY).argmax(-1).reshape(len(prompts), new).tolist()
        self.read += [prompt + row for prompt, row in zip(prompts, rows, strict=True)]
        with torch.inference_mode():
            for start in range(0, total := sum(end - start for start, end in spans), 256):
                self._products(min(256, total - start))
            for layer in range(self.layers):
                for start, end in spans:
                    self._attend(layer, 1, end - start, end)
            mean = sum(map(len, prompts)) // len(prompts)
            alike = len(prompts) // len(set(map(tuple, prompts)))
            shared = mean if alike > 1 else 0
            for step in range(new - 1):
                self._products(len(prompts))
                _product(torch.zeros(len(prompts), self.head.shape[1]), self.head)
                for layer in range(self.layers):
                    self._attend(layer, len(prompts), 1, mean - shared + step + 1)
                    if shared:
                        self._attend(layer, len(prompts) // alike, 1, shared, alike)
        return rows

    def _products(self, count: int) -> None:
        rows = {weight.shape[1]: torch.zeros(count, weight.shape[1]) for weight in self.weights}
        for weight in self.weights:
            _product(rows[weight.shape[1]], weight)

    def _attend(self, layer: int, count: int, queries: int, length: int, alike: int = 1) -> None:
        keys, values = (cache[layer, :count, :, :length] for cache in (self.keys, self.values))
        if queries == 1:
            query = torch.zeros(count, self.kv, self.groups * alike, self.dim)
            scaled_dot_product_attention(query, keys, values)
        else:
            query = torch.zeros(count, self.kv * self.groups, queries, self.dim)
            keys, values = (x.repeat_interleave(self.groups, 1) for x in (keys, values))
            scaled_dot_product_attention(query, keys[:, :, :queries], values[:, :, :queries], is_causal=True)


def _product(rows: torch.Tensor, weight: torch.Tensor) -> None:
    if len(rows) > 64:
        linear(rows, weight)
    else:
        out = torch.empty(len(rows), len(weight))
        kernels.product(rows.numpy(), weight.numpy(), out.numpy(), 0, len(weight))


def _common(a: Ids, b: Ids) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def single(generate: Generate, ids: Ids, conversations: int) -> int:
    prompts = [_piece(ids, 100 + 100 * i // conversations, i) for i in range(conversations)]
    return sum(map(len, generate(prompts, 64)))


def multi(generate: Generate, ids: Ids, conversations: int) -> int:
    prompts = [_piece(ids, 200, 100 + i) for i in range(conversations)]
    total = 0
    for turn in range(4):
        outputs = generate(prompts, 32)
        total += sum(map(len, outputs))
        new = [_piece(ids, 20, 1000 * (turn + 1) + i) for i in range(conversations)]
        prompts = [p + o + n for p, o, n in zip(prompts, outputs, new, strict=True)]
    return total


def siblings(generate: Generate, ids: Ids, conversations: int) -> int:
    prompts = [_piece(ids, 128, i // GROUP) for i in range(conversations)]
    return sum(map(len, generate(prompts, 64)))


def _piece(ids: Ids, length: int, seed: int) -> Ids:
    start = random.Random(seed).randrange(len(ids) - length)
    return ids[start : start + length]


LOADS = {"single": single, "multi": multi, "siblings": siblings}


def measure(model: Any, load: Callable[[Generate, Ids, int], int], ids: Ids, conversations: int, repeat: int) -> str:
    """Return one row: rates, and ratios to padded generate."""
    engines = (Padded(model), Embedded(model), Bound(model))
    rates: list[list[float]] = []
    for engine in engines:
        load(engine.generate, ids, conversations)
    for _ in range(repeat):
        rates.append([])
        for engine in engines:
            engine.fresh()
            began = time.process_time()
            tokens = load(engine.generate, ids, conversations)
            rates[-1].append(tokens / (time.process_time() - began))
    padded, own, bound = (statistics.median(column) for column in zip(*rates, strict=True))
    gain, most = (statistics.median(row[i] / row[0] for row in rates) for i in (1, 2))
    part = statistics.median(row[1] / row[2] for row in rates)
    return f"{padded:8.0f} {own:8.0f} {bound:8.0f}  x{gain:5.2f}  bound x{most:5.2f}  of it {part:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--models", nargs="+", default=["random", "trained"], choices=["random", "trained"])
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    ids = text()
    print(f"{given.conversations} conversations; tokens per CPU-second\n{'':24}  padded embedded    bound")
    for size in given.sizes:
        for kind in given.models:
            model = make_model(*SIZES[size])
            if kind == "trained":
                entropy = train(model, ids)
                print(f"({size} trained: entropy {entropy:.2f} nats)")
            for load in given.loads:
                row = measure(model, LOADS[load], ids, given.conversations, given.repeat)
                print(f"{size:5} {kind:8} {load:9} {row}", flush=True)


if __name__ == "__main__":
    main()
