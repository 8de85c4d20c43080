"""Savings by balancing and packing, on lognormal lengths like those of agent rollouts.

Run: python benchmarks/packing.py [--samples 1024] [--ranks 8] [--max-tokens 16384] [--trials 20]

Each row is one way to place the same samples. "padding" is the share of computed tokens that are padding; "slowest
rank" is the largest rank's computed tokens over the mean of real tokens: 1.00 is perfect, and at 1.50 the step takes
half as long again. "passes" is the number of microbatches a rank; "plan ms" the time to make the plan.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.train.packing import PackingPlan, make_plan, padded


@dataclass(frozen=True)
class Result:
    padding: float
    slowest: float
    passes: float
    milliseconds: float


def computed_tokens(lengths: list[int], made: PackingPlan, *, pad_to_longest: bool) -> list[int]:
    """Return the tokens that each rank computes, padding included."""
    sizes = [padded(length, made.alignment) for length in lengths]
    if not pad_to_longest:
        return [sum(sizes[i] for mb in rank for i in mb) for rank in made.ranks]
    return [sum(len(mb) * max((sizes[i] for i in mb), default=0) for mb in rank) for rank in made.ranks]


def measure(
    trials: Sequence[list[int]], planner: Callable[[list[int]], PackingPlan], *, pad_to_longest: bool
) -> Result:
    rows = []
    for lengths in trials:
        begin = time.perf_counter()
        made = planner(lengths)
        elapsed = time.perf_counter() - begin
        computed, real = computed_tokens(lengths, made, pad_to_longest=pad_to_longest), sum(lengths)
        slowest = max(computed) / (real / len(computed))
        rows.append((1 - real / sum(computed), slowest, len(made.ranks[0]), 1e3 * elapsed))
    return Result(*np.mean(rows, axis=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--median", type=float, default=1500.0, help="median length in tokens")
    parser.add_argument("--sigma", type=float, default=0.9, help="standard deviation of log(length)")
    parser.add_argument("--longest", type=int, default=16384, help="lengths are cut off here")
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rng = np.random.default_rng(args.seed)
    shape = (args.trials, args.samples)
    drawn = np.clip(rng.lognormal(np.log(args.median), args.sigma, shape), 1, args.longest).astype(int).tolist()
    ranks, size, budget = args.ranks, args.micro_batch_size, args.max_tokens
    ways: dict[str, tuple[Callable[[list[int]], PackingPlan], bool]] = {
        "dealt out, padded batches": (lambda n: make_plan(n, ranks, micro_batch_size=size, balance=False), True),
        "balanced, padded batches": (lambda n: make_plan(n, ranks, micro_batch_size=size), True),
        "dealt out, packed": (lambda n: make_plan(n, ranks, max_tokens=budget, balance=False), False),
        "balanced, packed": (lambda n: make_plan(n, ranks, max_tokens=budget), False),
        "balanced, packed, aligned to 16": (lambda n: make_plan(n, ranks, max_tokens=budget, alignment=16), False),
    }
    print(f"{args.samples} samples, {ranks} ranks, median {args.median:g} tokens, sigma {args.sigma:g},", end=" ")
    print(f"{size} samples or {budget} tokens a microbatch, mean of {args.trials} draws\n")
    print("| way | padding | slowest rank | passes | plan ms |\n|---|---|---|---|---|")
    for name, (planner, fill) in ways.items():
        r = measure(drawn, planner, pad_to_longest=fill)
        print(f"| {name} | {r.padding:.1%} | {r.slowest:.3f} | {r.passes:.1f} | {r.milliseconds:.1f} |")


if __name__ == "__main__":
    main()
