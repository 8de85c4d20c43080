"""Learning curves: the calculator demo with each algorithm, and its success on held-out problems every five steps.

    python -m benchmarks.algorithms [--only gspo cispo] [--seeds 0 1] [--json FILE] [--plot docs/algorithms.svg]

1. All settings except those in `RECIPES` are the demo's (`agentrl.demo`: one process, one rollout ahead, 16 prompts x 8
   samples, learning rate 3e-4, clipping at .2 and .28, a mean over tokens). A run has 30 steps instead of 20.
2. Success is measured on 200 problems whose operands occur neither in the warm start nor in training, with one sample
   each at temperature 1. An algorithm `learned` if it began at .40 or below and an evaluation found .80 or more.
3. `--json` stores the curves next to those already in the file; `--plot` draws all of them. Each run is a separate
   process and takes one to two minutes of CPU; the first run of a seed makes its model.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.demo.example import held_out
from benchmarks.time_to_reward import timed
from tests.support.checkout import import_path

EVERY = 5
START, GOAL = 0.40, 0.80

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"grpo_std_normalization": False, "calculate_per_token_loss": False, "loss_denominator": "constant"},
    # Clipping and token mean are DAPO's. Answers with a tool call have about 32 tokens; above 48 they are penalized.
    "dapo": {
        "dynamic_sampling_filter_path": "agentrl.rollout.filters:nonzero_std",
        "overlong_buffer_len": 32,
        "loss_max_length": 80,
    },
    # A ratio that is a mean over a sample's tokens varies far less than a token's ratio.
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4, "calculate_per_token_loss": False},
    # No lower bound, and a wide upper bound: CISPO clips weights there, never gradients.
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0},
    "rloo": {"advantage_estimator": "rloo"},
    "sapo": {"advantage_estimator": "sapo", "eps_clip": None, "eps_clip_high": None},
    "dppo": {"advantage_estimator": "dppo", "eps_clip": None, "eps_clip_high": None},
    "gmpo": {"advantage_estimator": "gmpo", "eps_clip": 0.4, "eps_clip_high": None},  # the paper's bounds
    "pass_at_k": {"advantage_estimator": "pass_at_k", "pass_k": 2},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline"},
    # The critic starts from the policy's weights. The first two rollouts train only the critic, and count as steps.
    "ppo": {
        "advantage_estimator": "ppo",
        "normalize_advantages": True,
        "critic_lr": 1e-3,
        "num_critic_only_steps": 2,
    },
}

Curves = dict[str, dict[str, list[float]]]
"""Success at every evaluation, by algorithm and seed."""


def learn(name: str, seed: int, steps: int) -> list[float]:
    """Run one training and return the success of every evaluation, the first before training."""
    with tempfile.TemporaryDirectory() as folder:
        form = {"eval_interval": EVERY, **RECIPES[name]}
        asked = {"folder": folder, "seed": seed, "steps": steps, "form": form}
        command = [sys.executable, "-m", "benchmarks.time_to_reward", "--one", json.dumps(asked)]
        timed(command, {**os.environ, "PYTHONPATH": import_path(), "HF_HUB_OFFLINE": "1"})
        return held_out(Path(folder), "reward")


def row(name: str, seed: int, success: Sequence[float]) -> str:
    learned = success[0] <= START and max(success[1:]) >= GOAL
    return f"| {name}, {seed} | " + " | ".join(f"{s:.3f}" for s in success) + f" | {'yes' if learned else 'no'} |"


def plot(path: Path, curves: Curves) -> None:
    """Draw an SVG with one panel for each algorithm and one line for each seed."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    columns = 3
    rows = -(-len(curves) // columns)
    last = EVERY * (max(len(success) for seeds in curves.values() for success in seeds.values()) - 1)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "agentrl"}):
        figure = Figure(figsize=(9, 2.3 * rows), layout="constrained")
        for index, (name, seeds) in enumerate(curves.items()):
            axes = figure.add_subplot(rows, columns, index + 1)
            for (seed, success), colour in zip(seeds.items(), ("#3451b2", "#c2570c", "#1a7f4b"), strict=False):
                xs = [EVERY * at for at in range(len(success))]
                axes.plot(xs, success, marker="o", markersize=3, linewidth=1.6, label=f"seed {seed}", color=colour)
            axes.axhline(GOAL, color="#888", linewidth=0.8, linestyle="--")
            axes.set(xlim=(-1, last + 1), ylim=(0, 1.02), xlabel="steps" if index >= len(curves) - columns else "")
            axes.set_title(name, fontsize=10)
            axes.set_xticks(range(0, last + 1, 10))
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            if index == 0:
                axes.legend(fontsize=8, frameon=False, loc="lower right")
        FigureCanvasSVG(figure).print_svg(str(path), metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(RECIPES), default=list(RECIPES), help="none: only --plot")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, default=Path("runs/algorithms.json"), help="where the curves are kept")
    parser.add_argument("--plot", type=Path, help="an SVG of all curves that are kept")
    options = parser.parse_args()
    curves: Curves = json.loads(options.json.read_text()) if options.json.is_file() else {}
    print("| algorithm, seed | " + " | ".join(str(at) for at in range(0, options.steps + 1, EVERY)) + " | learned |")
    for name in options.only:
        for seed in options.seeds:
            success = learn(name, seed, options.steps)
            curves.setdefault(name, {})[str(seed)] = success
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(curves, indent=1) + "\n")
            print(row(name, seed, success), flush=True)
    if options.plot:
        plot(options.plot, {name: curves[name] for name in RECIPES if name in curves})


if __name__ == "__main__":
    main()
