"""Rollouts until the calculator demo succeeds, with and without a teacher that is the model itself with a hint.

    python -m benchmarks.self_distillation [--seeds 0 1] [--lr 6e-4] [--kl-coef 0.3]

1. The shipped model cannot read hints, so `agentrl sft` teaches it on 4,096 conversations. With a second user message,
   which names the expression, it calls the tool correctly. Without it the model guesses, except for a share `--skill`.
2. `grpo` is the demo from this model. `self` adds `--use-opd --opd-type self`: the teacher sees the hint, the student
   does not. `self alone` has the teacher and no rewards. In `frozen` the teacher is the model before training, behind
   `agentrl serve`. All else is equal. Held-out problems have no hints.
3. A row has the success at every second rollout, and the first rollout at or above the goal. A run takes a minute.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.demo.example import held_out
from agentrl.demo.task import CalculatorEnv, make_problem, make_problems
from agentrl.tiny import shipped
from benchmarks.time_to_reward import timed
from examples.tiny_models.calculator import demonstrate
from tests.support.checkout import import_path
from tests.support.embedded_server import embedded_server

EVERY, PROMPTS = 2, 16
HINT = "Tool: {}"
SELF: Mapping[str, Any] = {
    "use_opd": True,
    "opd_type": "self",
    "opd_privileged_key": "hint",
    "opd_privileged_prompt": "{text}",
}
FORMS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "self": SELF,
    "self alone": {**SELF, "advantage_estimator": "on_policy_distillation"},
    "frozen": {name: value for name, value in SELF.items() if name != "opd_type"},
}


async def conversations(count: int, skill: float) -> list[list[dict[str, Any]]]:
    """Yield demonstrations. Every second one is correct and has the hint; of the others a share `skill` is correct."""
    rng, tools = random.Random("hints"), CalculatorEnv().toolbox
    found = []
    for number in range(count):
        problem, hinted = make_problem(rng, "train"), number % 2 == 0
        good = hinted or rng.random() < skill
        question, *rest = await demonstrate(problem, "good" if good else "guess", rng, tools)
        hint = [{"role": "user", "content": HINT.format(problem.expression)}] if hinted else []
        found.append([question, *hint, *rest])
    return found


def teach(folder: Path, skill: float) -> Path:
    """Train a model that reads hints. Returns its folder."""
    tools = CalculatorEnv().toolbox.schemas
    rows = [{"messages": messages, "tools": tools} for messages in asyncio.run(conversations(4096, skill))]
    (folder / "lessons.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "hf-checkpoint": shipped("calculator"),
        "prompt-data": folder / "lessons.jsonl",
        "output-dir": folder / "sft",
        "save-hf": folder / "taught",
        "backend": "local",
        "rollout-batch-size": 32,
        "lr": 2e-3,
        "lr-decay-style": "cosine",
        "save-interval": 1000,
    }
    command = [sys.executable, "-m", "agentrl", "sft", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"]
    timed([*command, *(str(x) for name, value in flags.items() for x in (f"--{name}", value))], environment())
    return folder / "taught"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": import_path(), "HF_HUB_OFFLINE": "1"}


def learn(form: Mapping[str, Any], model: Path, seed: int, rollouts: int) -> list[float]:
    """Run one training and return the success of every evaluation, the first before training."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder).with_suffix(".jsonl")
        rows = (
            {
                "prompt": [{"role": "user", "content": problem.question}],
                "label": str(problem.answer),
                "metadata": {"hint": HINT.format(problem.expression)},
            }
            for problem in make_problems(rollouts * PROMPTS, "train", seed)
        )
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        own = {"hf_checkpoint": str(model), "prompt_data": str(prompts), "eval_interval": EVERY}
        asked = {"folder": folder, "seed": seed, "steps": rollouts, "form": {**own, **form}}
        timed([sys.executable, "-m", "benchmarks.time_to_reward", "--one", json.dumps(asked)], environment())
        prompts.unlink()
        return held_out(Path(folder), "reward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--goal", type=float, default=0.9)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--kl-coef", type=float, default=1.0, help="--opd-kl-coef of the forms with a teacher")
    parser.add_argument("--skill", type=float, default=0.004, help="success of the taught model without a hint")
    parser.add_argument("--model", type=Path, help="a model that reads hints; by default one is taught")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        model = options.model or teach(Path(work), options.skill)
        steps = range(0, options.rollouts + 1, EVERY)
        print("| form, seed | " + " | ".join(map(str, steps)) + f" | at {options.goal} |")
        with embedded_server(model) as teacher:
            for name in options.only:
                form = {**FORMS[name], "lr": options.lr}
                form |= {"opd_kl_coef": options.kl_coef} if form.get("use_opd") else {}
                form |= {"opd_teacher_url": [teacher]} if name == "frozen" else {}
                for seed in options.seeds:
                    success = learn(form, model, seed, options.rollouts)
                    first = next((str(at) for at, s in zip(steps, success, strict=False) if s >= options.goal), "never")
                    print(
                        f"| {name}, {seed} | " + " | ".join(f"{s:.3f}" for s in success) + f" | {first} |", flush=True
                    )


if __name__ == "__main__":
    main()
