"""Effect of corrections for stale tokens: the calculator demo at a high learning rate, with weights 4 rollouts old.

    python -m benchmarks.off_policy [--seeds 0 1 2] [--steps 20] [--lr 6e-4] [--staleness 4] [--only tis mis]

1. Each form is one run for each seed from the demo's model. It differs only in learning rate, staleness and correction.
2. Success is that on held-out problems after half of the steps and at the end. The other columns are means over the
   last half of the rollouts: `stale` (staleness), `off` (mean |log trainer - log engine|), `ess` (effective sample size
   of the ratios), `cut` (share of tokens whose weight was truncated or masked).
"""

import argparse
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from agentrl import Sample
from agentrl.demo.example import held_out
from benchmarks.time_to_reward import Form, demo

FORMS: dict[str, Form] = {
    "fresh": {"max_staleness": 0},
    "none": {"use_rollout_logprobs": False},
    "engine": {},
    "noise": {"dynamic_sampling_filter_path": "benchmarks.off_policy:add_noise"},
    "tis": {"use_tis": True},
    "mis": {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.5},
    "tis+opsm": {"use_tis": True, "use_opsm": True},
    "dppo": {"advantage_estimator": "dppo", "eps_clip": None, "eps_clip_high": None},
    "sapo": {"advantage_estimator": "sapo", "eps_clip": None, "eps_clip_high": None},
    "mis+opsm": {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.5, "use_opsm": True},
}
"""S = 0; stale with the ratio to the trainer's own log-probs; the ratio to the engine's (the default), then with added
noise; corrections; other algorithms."""


def add_noise(args: object, samples: list[Sample]) -> bool:
    """Add N(0, .1) to the engine's log-prob of each trained token, like an engine with other numerics.
    A group filter that keeps every group."""
    for sample in samples:
        noise = random.Random(sample.index)
        pairs = zip(sample.rollout_log_probs or (), sample.loss_mask or (), strict=True)
        sample.rollout_log_probs = [value + noise.gauss(0, 0.1) * mask for value, mask in pairs]
    return True


def measured(options: argparse.Namespace, name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run one form and return the table's columns."""
    form = {"lr": options.lr, "max_staleness": options.staleness} | FORMS[name]
    form |= {"eval_before_train": False, "eval_interval": options.steps // 2}
    run = demo(options, folder, seed, form)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    late = [row for row in rows if row["step"] >= options.steps // 2]

    def mean(metric: str) -> float:
        return statistics.fmean([row[metric] for row in late if metric in row] or [float("nan")])

    half, *_, final = held_out(folder, "reward")
    return {
        "half": half,
        "final": final,
        "stale": mean("staleness/mean"),
        "off": mean("train/train_rollout_logprob_abs_diff"),
        "ess": mean("train/mismatch_ess"),
        "cut": mean("train/tis_clipfrac" if "use_tis" in form else "train/pg_clipfrac"),
        "seconds": run.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=FORMS, default=list(FORMS))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    columns = ("half", "final", "stale", "off", "ess", "cut", "seconds")
    print(f"{'form':<9} {'seed':>4} " + " ".join(f"{name:>7}" for name in columns))
    finals: dict[str, list[float]] = {name: [] for name in options.only}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for name in options.only:
                found = measured(options, name, seed, Path(folder) / f"{name}-{seed}")
                finals[name].append(found["final"])
                shown = " ".join(f"{value:>7.3f}" for key, value in found.items() if key != "seconds")
                print(f"{name:<9} {seed:>4} {shown} {found['seconds']:>7.0f}", flush=True)
    for name, values in finals.items():
        print(f"{name:<9} mean final {statistics.mean(values):.3f}")


if __name__ == "__main__":
    main()
