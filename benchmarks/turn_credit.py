"""Six turns, one of which counts: how many steps a run needs to learn the right answers.

    python -m benchmarks.turn_credit [--seeds 0 1 2] [--steps 90] [--set NAME=VALUE ...] [--json FILE]

1. A game shows six signs, one a turn, and the model answers each with a word. Each sign has one right word, but only
   one turn counts, a different one in each game: its step reward is 1 for the right word and else 0. The other five
   answers change nothing, and the model is not told which turn counts. Success is that reward.
2. The trajectory's reward is the sum of the step rewards. With one advantage for a trajectory, the five answers without
   effect get the credit of the sixth, about other signs: five parts of noise to one of signal. Nothing else is hard.
3. The model has two layers. Its warm start (`examples.tiny_models.warm_start`, half a minute, cached) taught it to
   answer with one of eight words, and with the right one a little more often: success begins at about .2.
4. Rollout, engine, ledger and trainer are the run's own, in one process (`--backend local`), one run after another.

`--set` sets any setting by its flat name (JSON values; other values are text). Prints the success of every step, and
the first step at whose end the mean of the last five steps was at least .8. Each seed is a separate process of about
a CPU second a step.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrl.envs import Environment, Step, Turn
from agentrl.sample import Message, Sample
from examples.tiny_models.acceptance import PhraseCheck
from examples.tiny_models.warm_start import Phase, WarmStartSettings, in_own_process, warm_start
from tests.support.checkout import ROOT

TURNS = 6
RIGHT = {"sun": "red", "moon": "blue", "star": "green", "tree": "gold", "bird": "grey", "fish": "pink"}
RIGHT |= {"stone": "white", "river": "black"}
WORDS = tuple(RIGHT.values())
KNOWN = 0.15
"""How often the demonstrations have the right word; else any of the eight."""
GOAL, WINDOW = 0.8, 5
PROMPTS, SAMPLES = 8, 8


class OneTurnCounts(Environment):
    """Six signs. The answer to one of them, `metadata["counts"]` (from 1), is worth 1 or 0, the others nothing."""

    max_turns = TURNS

    async def reset(self, sample: Sample) -> list[Message]:
        self.signs, self.counts = sample.metadata["signs"], sample.metadata["counts"]
        return [shown(self.signs[0])]

    async def step(self, turn: Turn) -> Step:
        right = turn.content.strip() == RIGHT[self.signs[turn.index - 1]]
        reward = float(right) if turn.index == self.counts else None
        if turn.index == TURNS:
            return Step(reward=reward, done=True)
        return Step([shown(self.signs[turn.index])], reward=reward)

    async def reward(self, sample: Sample) -> float:
        """Return the sum of the step rewards."""
        return sum(reward or 0.0 for reward in sample.metadata["step_rewards"])


def shown(sign: str) -> Message:
    return {"role": "user", "content": sign}


def games(name: str) -> Iterator[dict[str, Any]]:
    """Yield games without end, the same for the same name: six different signs, and the turn that counts."""
    rng = random.Random(name)
    while True:
        yield {"signs": rng.sample(list(RIGHT), TURNS), "counts": rng.randint(1, TURNS)}


class RoughIdea:
    """Demonstrations for the tiny model: one of the words, the right one somewhat more often."""

    markup = ()

    def corpus(self) -> Iterator[str]:
        yield from ("\n".join([*RIGHT, *WORDS, "user\n", "assistant\n"]) for _ in range(50))

    def tools(self, conversation: Sequence[Message] = ()) -> list[dict[str, Any]]:
        return []

    async def demonstrations(self, phase: Phase, seed: int) -> AsyncIterator[list[Message]]:
        rng = random.Random(f"words {seed}")
        for game in games(f"lessons {phase} {seed}"):
            words = [RIGHT[sign] if rng.random() < KNOWN else rng.choice(WORDS) for sign in game["signs"]]
            answers = ({"role": "assistant", "content": word} for word in words)
            yield [m for sign, answer in zip(game["signs"], answers, strict=True) for m in (shown(sign), answer)]

    async def checks(self) -> list[PhraseCheck]:
        return []


def recipe(seed: int) -> WarmStartSettings:
    """Return the recipe. These answers cannot be checked, so the first round is the last."""
    sizes = {"layers": 2, "hidden": 64, "vocab_size": 320, "context_length": 256}
    return WarmStartSettings(seed=seed, **sizes, skill_steps=200, habit_steps=40)


def run(folder: Path, cache: Path, seed: int, steps: int, form: dict[str, Any]) -> None:
    """Run one training in this process."""
    from agentrl.cluster.launch import train
    from agentrl.config import RunSettings

    model = cache.resolve() / f"rough-idea-{seed}"
    if not model.is_dir():
        in_own_process(warm_start, model, RoughIdea(), recipe(seed), print)
    prompts, dealt = folder / "games.jsonl", games(f"training {seed}")
    rows = [{"input": "six signs", "metadata": next(dealt)} for _ in range(steps * PROMPTS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "hf_checkpoint": str(model),
        "output_dir": str(folder / "run"),
        "env": "benchmarks.turn_credit:OneTurnCounts",
        "prompt_data": str(prompts),
        "backend": "local",
        "num_rollout": steps,
        "rollout_batch_size": PROMPTS,
        "n_samples_per_prompt": SAMPLES,
        "rollout_seed": seed,
        "rollout_max_response_len": 4,
        "advantage_estimator": "grpo",
        "calculate_per_token_loss": True,
        "lr": 6e-4,
        "weight_decay": 0.0,
        "adam_beta2": 0.95,
        "clip_grad": 1.0,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 16_384,
        "seed": seed,
        "train_threads": 1,
        "embedded_threads": 1,
        "embedded_slots": PROMPTS * SAMPLES,
        "use_tensorboard": False,
        "progress": "plain",
    }
    train(RunSettings.from_flat(settings | form))


def first_good(success: Sequence[float]) -> int | None:
    """Return the first step (from 1) at whose end the mean of the last five was at least .8."""
    ends = range(WINDOW, len(success) + 1)
    return next((end for end in ends if sum(success[end - WINDOW : end]) >= GOAL * WINDOW), None)


def run_apart(asked: dict[str, Any]) -> list[float]:
    """Run `run` in a separate process. Returns the success of every step."""
    from agentrl.observability.metrics import read_metrics
    from agentrl.runfolder import METRICS

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.turn_credit", "--one", json.dumps({**asked, "folder": folder})]
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            status = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, cwd=ROOT, check=False).returncode
        if status:
            raise SystemExit(f"the run failed:\n{log.read_text()[-4000:]}")
        return [float(row["rollout/reward"]) for row in read_metrics(Path(folder) / "run" / METRICS)]


def setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument(
        "--set", type=setting, nargs="+", default=[], metavar="NAME=VALUE", help="settings by flat name"
    )
    parser.add_argument("--cache", type=Path, default=Path("runs/cache"), help="where warm-started models are")
    parser.add_argument("--json", type=Path, help="write the curves into this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        asked = json.loads(options.one)
        run(Path(asked["folder"]), Path(asked["cache"]), asked["seed"], asked["steps"], asked["form"])
        return
    form, found = dict(options.set), []
    print(f"settings besides the benchmark's own: {form or 'none'}")
    for seed in options.seeds:
        began = time.monotonic()
        success = run_apart({"cache": str(options.cache), "seed": seed, "steps": options.steps, "form": form})
        found.append({"seed": seed, "first_step": first_good(success), "success": [round(s, 3) for s in success]})
        print(f"seed {seed}: first at .8 after step {found[-1]['first_step']}, {time.monotonic() - began:.0f} s")
        print(" ".join(f"{value:.2f}" for value in success), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"settings": form, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
